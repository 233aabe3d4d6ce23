"""Which lanes of a step are compiled with `torch.compile`, and whether `step_mode: auto` compiles any.

Compiled and eager code round differently, so this must not depend on the number of ranks: a lane is compiled if its
batch has the form of the run's first full step. All others run eagerly, such as those of a short last step.
"""

from __future__ import annotations

import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.config import Settings
from paceline.data.feed import LaneInputs
from paceline.data.lanes import Lane
from paceline.data.seeding import seed_generators
from paceline.engine.compile_gain import DEVICES, Gain, WorkCounter, gain_of
from paceline.engine.compiled_lanes import CompiledObjective, Report, form_of
from paceline.engine.cuda_graph import HostState, first_cause
from paceline.engine.forward_state import Snapshot
from paceline.engine.gradients import Backward
from paceline.engine.outer_state import outer_state
from paceline.formatting import duration
from paceline.system.home import use_compiler_cache
from paceline.world import World

COMPILING = "compiling the step: the first step takes longer"
MAX_VARIANTS = 64  # of one function, which the layers of a model may share although they differ


class Compilation:
    """Decides before the first step of a run whether its lanes are compiled; a resumed run keeps the decision."""

    def __init__(
        self, backwards: Sequence[Backward], settings: Settings, world: World, *, steps: int | None, report: Report
    ) -> None:
        """`steps` is the length of the run, if it is known; `report` writes a line for the user."""
        self._backwards, self._settings, self._world, self._steps, self._report = (
            backwards, settings, world, steps, report
        )  # fmt: skip
        self._replica, self._feed = backwards[0].replica, backwards[0].feed
        self._is_auto = settings.step_mode == "auto"
        self._is_settled = not (settings.step_mode == "compile" or (self._is_auto and self._may_gain()))
        self.form: str | None = None  # of the batches that are compiled; None if none is

    def _may_gain(self) -> bool:
        """Whether `auto` considers to compile at all."""
        settings = self._settings
        # A collate_fn may pad each batch to another length.
        has_one_form = settings.collate_fn is None
        is_plain = len(self._backwards) == 1 and not any(
            (settings.find_unused_parameters, settings.static_graph, settings.sync_batchnorm)
        )
        modules = self._replica.module.modules()
        has_python = not any(isinstance(module, torch.jit.ScriptModule) for module in modules)
        is_known = self._steps is not None
        return self._world.device.type in DEVICES and has_one_form and is_plain and has_python and is_known

    def refuse(self) -> None:
        """Make `auto` compile nothing: the model calls collectives, which the compiler may move. All ranks."""
        self._is_settled |= self._is_auto

    def begin_step(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> None:
        """Decide before the first full step. All ranks."""
        if self._is_settled:
            return
        is_full = lanes[0].step_samples == self._settings.batch_size * self._settings.lanes
        self._is_settled = is_full or self._is_auto
        if is_full:
            of_ranks = self._world.gather_objects([form_of(self._feed.batch(each)) for each in inputs])
            if not self._is_auto:
                self._report(COMPILING)
                self._compile(of_ranks[0][0])
            elif len({form for forms in of_ranks for form in forms}) == 1:
                self._compile_if_clear(of_ranks[0][0], lanes[0], inputs[0])

    def _compile(self, form: str) -> None:
        self.form = form
        prepare_compiler(self._world.device, is_exact=self._settings.exact)
        for each in self._backwards:
            each.compiled = CompiledObjective(each.objective, form, self._settings, self._report)

    def _compile_if_clear(self, form: str, lane: Lane, inputs: LaneInputs) -> None:
        """Compile if the estimate is clear and the compiler succeeds on all ranks. All ranks."""
        gain = self._world.gather_objects(self._gain(inputs) if self._world.is_main else None)[0]
        if gain is None or not gain.is_clear:
            return
        self._report(f"step_mode: auto compiles the step, which takes about {duration(gain.compile_s)}: {_why(gain)}")
        began = time.perf_counter()
        problems = self._world.gather_objects(self._try(form, lane, inputs))
        problem = next((each for each in problems if each is not None), None)
        if problem is None:
            self._report(f"the step is compiled, after {duration(time.perf_counter() - began)}")
            return
        self.form, self._backwards[0].compiled = None, None
        self._report(f"step_mode: auto continues without compiling, the compiler failed: {problem}")

    def _gain(self, inputs: LaneInputs) -> Gain | None:
        """The estimated gain; None if the forward pass fails, which the first step reports."""
        backward, counter = self._backwards[0], WorkCounter()
        assert self._steps is not None
        with self._undone():
            try:
                with torch.no_grad(), backward.autocast, counter:  # without the memory of an eager step
                    backward.objective(self._replica.module, self._feed.batch(inputs))
            except Exception:  # noqa: BLE001 - anything in a model
                return None
        return gain_of(counter.work, self._steps)

    def _try(self, form: str, lane: Lane, inputs: LaneInputs) -> str | None:
        """Compile forward and backward on this rank; return why that is not possible, or None if it is."""
        with self._undone() as restore:
            try:
                self._compile(form)
                self._backwards[0].lane_gradients(lane, inputs)
                restore()
                with torch.compiler.set_stance("fail_on_recompile"):  # the code must fit the next step, too
                    self._backwards[0].lane_gradients(lane, inputs)
            except Exception as error:  # noqa: BLE001 - anything in a model or in the compiler
                return first_cause(error)
        return None

    @contextmanager
    def _undone(self) -> Iterator[Callable[[], None]]:
        """Restores afterwards what forward and backward change; gives a function that does it earlier."""
        state, before = self._replica.forward_state, Snapshot()
        host = HostState(self._replica.module, outer_state(self._settings))
        before.take(state.tensors())

        def restore() -> None:
            host.restore()
            before.restore(state.tensors())
            seed_generators(self._settings.seed, "probe")

        seed_generators(self._settings.seed, "probe")
        try:
            yield restore
        finally:
            restore()
            for parameter in self._replica.module.parameters():
                parameter.grad = None

    # --- state -------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, str]:
        """The form of the compiled batches, for a checkpoint; nothing if no lane is compiled."""
        return {} if self.form is None else {"compiled": self.form}

    def set_counters(self, form: str | None) -> None:
        """Continue with the decision of the run that is resumed; other values of `step_mode` take precedence."""
        if self._is_auto:
            self._is_settled = True
        if form is not None and self._settings.step_mode in ("auto", "compile"):
            self._is_settled = True
            self._report(COMPILING)
            self._compile(form)


def prepare_compiler(device: torch.device, *, is_exact: bool) -> None:
    """Load the compiler, set its cache, and make it raise an error where it would fall back in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the compiler uses what torch has deprecated
        import torch._inductor.compile_fx
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    # Threads, because code for a CPU is made for their number.
    parts = (f"torch-{torch.__version__}", f"python-{platform.python_version()}", device.type, name)
    key = "-".join([*parts, *([] if device.type == "cuda" else [f"{torch.get_num_threads()}-threads"])])
    use_compiler_cache(re.sub(r"[^\w.+-]+", "_", key), default=default_cache_dir())
    if is_exact:  # else the variants that run eagerly are those that a rank happens to meet last
        torch._dynamo.config.recompile_limit = MAX_VARIANTS  # type: ignore[attr-defined]
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # type: ignore[attr-defined]


def _why(gain: Gain) -> str:
    each = 1e3 * gain.saved_s_per_step
    return f"{gain.steps:,} steps, each about {each:.3g} ms shorter, save about {duration(gain.saved_s)}"


def _processor() -> str:
    """The name of the processor, for whose instructions code is compiled."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.machine()
