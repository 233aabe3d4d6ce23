"""A step as CUDA graphs: recorded once, then replayed, so that a step costs one launch for each lane.

There is one graph for each lane of this rank, because generators are seeded between lanes; the last one includes
reduction and update. All that changes from step to step is copied into the tensors that were recorded. Batches of other
shapes have recordings of their own, and one more has marks between its phases, for the clock.

Sums over ranks are part of a recording. NCCL requires that all ranks replay the same recording in the same step, or
none, so several ranks agree on each step; a single rank decides alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from paceline.config import Settings
from paceline.data.feed import LaneInputs
from paceline.data.lanes import Lane
from paceline.data.seeding import seed_for, seed_generators
from paceline.data.trees import leaves_in, map_tensors, tensors_in
from paceline.engine.clock import DeviceClock, PhaseMark
from paceline.engine.outer_state import outer_state
from paceline.user_code import user_location
from paceline.world import World

# Steps before the recording: by then kernels are chosen and states created. DDP times its first ten steps.
WARM_UP, WARM_UP_IN_DDP = 3, 11
RECORD_AT = 3  # another form of inputs is recorded at its third step
MAX_FORMS = 64  # the most forms that are recorded
RECORDING_COST_FACTOR = 500  # a recording only for the clock is made after 500 times as long as a recording takes

Work = Callable[..., torch.Tensor]


class CannotRecord(Exception):
    """A replay would not do the same as the step; the message has the reason."""


class Recording(NamedTuple):
    """A recorded step for inputs of one form."""

    graphs: list[torch.cuda.CUDAGraph]  # one for each lane
    inputs: list[torch.Tensor]
    row: torch.Tensor
    marks: list[PhaseMark]  # between its phases, if it was recorded for the clock
    randomness: torch.Generator  # its graphs read the seed and offset of this generator


class AsRecorded:
    """Within it, code that asks torch whether it is being recorded gets the answer of a recording.

    Models of transformers read the values of a mask only outside of a recording, and then choose other kernels. So
    steps before the recording would have other bits than those after it, which begin at another step on several ranks
    and after a resume.
    """

    def __init__(self) -> None:
        self._kept: Callable[[], bool] | None = None

    def __enter__(self) -> None:
        self._kept = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = _always

    def __exit__(self, *error: object) -> None:
        assert self._kept is not None
        torch.cuda.is_current_stream_capturing = self._kept


def _always() -> bool:
    return True


class StepGraph:
    """Records a step of full lanes after a warm-up, and replays it for all later steps of the same form."""

    def __init__(
        self,
        work: Work,
        model: torch.nn.Module,
        settings: Settings,
        world: World,
        clock: DeviceClock,
        *,
        full_step: int,
        has_one_form: bool,
        obstacle: str | None,
        is_in_ddp: bool,
        warn: Callable[[str], None],
    ) -> None:
        """All ranks.

        `full_step` is the number of samples of a step whose lanes are all full, over all ranks; `has_one_form` is true
        if all such steps are known to have one form; `obstacle` is a known reason why steps cannot be recorded.
        """
        self.work, self.model, self.settings, self.world, self.clock = work, model, settings, world, clock
        self.warn, self.full_step = warn, full_step
        self.steps_to_wait = WARM_UP_IN_DDP if is_in_ddp else WARM_UP
        self.is_given_up = False
        if obstacle is not None:
            self.give_up(obstacle)
        self._has_one_form = has_one_form
        self._recordings: dict[Any, Recording | None] = {}  # by form; None where it cannot be recorded
        self._seen: Counter[Any] = Counter()
        self._exchange = world.exchange() if world.size > 1 and not has_one_form and not self.is_given_up else None
        self._timed: Recording | None = None  # with marks, for the clock
        self._timed_form: Any = None  # the form for which that was tried
        self._samples_to_wait = 0  # steps sampled by the clock, until there is time for a recording with marks
        self._pool: Any = None
        self._last: Recording | None = None  # the one replayed last, unless an attempt to record followed

    def take(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> torch.Tensor | None:
        """Replay a step and return its row; None if the step must run eagerly. All ranks."""
        if self.is_given_up:
            return None
        row = self._take(lanes, inputs)
        if row is None:
            self.clock.discard_sample()  # its time is not typical
        return row

    def _take(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> torch.Tensor | None:
        # Not this rank's lanes alone: in a short step they may be full on one rank and not on another.
        if lanes[0].step_samples != self.full_step:
            return None
        if self.steps_to_wait:
            self.steps_to_wait -= 1
            return None
        form = () if self._has_one_form else form_of(inputs)
        if not self._recordings:
            self._record_first(form, lanes, inputs)
        elif self.world.size == 1 and form not in self._recordings:
            self._record_another(form, lanes, inputs)
        recording = self._recordings.get(form)
        if self._exchange is not None:
            self._exchange.begin(recording is None)
            recording = None if any(self._exchange.end()) else recording
        if recording is not None and self.clock.is_sampling:
            recording = self._with_marks(form, recording, lanes, inputs)
        return self._replay(recording, lanes, inputs) if recording is not None else None

    def _replay(self, recording: Recording, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> torch.Tensor:
        for recorded, tensor in zip(recording.inputs, tensors_in(inputs), strict=True):
            recorded.copy_(tensor, non_blocking=True)
        generator = torch.cuda.default_generators[self.world.device.index]
        if recording is not self._last:
            generator.graphsafe_set_state(recording.randomness)
            self._last = recording
        for lane, graph in zip(lanes, recording.graphs, strict=True):
            generator.manual_seed(seed_for(self.settings.seed, "forward", lane.step, lane.lane))
            graph.replay()
        self.clock.add_marks(recording.marks)
        return recording.row.clone()

    # --- recording ---------------------------------------------------------------------------------------------

    def _record_first(self, form: Any, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> None:
        """Record for the first time, at the same step on all ranks; give up unless it works on all. All ranks."""
        began = perf_counter()
        found = self._record(lanes, inputs)
        reasons, seconds = self._agree(found, perf_counter() - began)
        if reasons:
            self.give_up(reasons[0])
        elif isinstance(found, Recording):
            self._recordings[form] = found
            self._samples_to_wait = int(RECORDING_COST_FACTOR * seconds)  # the clock samples a step about once a second

    def _record_another(self, form: Any, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> None:
        """Record another form when it has occurred several times; on a single rank only."""
        if len(self._recordings) >= MAX_FORMS:
            return
        self._seen[form] += 1
        if self._seen[form] < RECORD_AT:
            return
        found = self._record(lanes, inputs)
        if isinstance(found, str) and None not in self._recordings.values():
            self.warn(f"steps with batches of some shapes are not CUDA graphs but run kernel by kernel: {found}")
        self._recordings[form] = None if isinstance(found, str) else found
        if len(self._recordings) == MAX_FORMS:
            self.warn(f"batches have many shapes: {MAX_FORMS} are CUDA graphs now, other steps run kernel by kernel")

    def _with_marks(
        self, form: Any, recording: Recording, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]
    ) -> Recording:
        """The recording with marks, if it has this form; it is made once enough time has passed. All ranks."""
        self._samples_to_wait -= 1
        if self._timed is not None and self._timed_form == form:
            return self._timed
        self.clock.discard_sample()
        if self._timed_form is None and self._samples_to_wait < 0:
            found, self._timed_form = self._record(lanes, inputs, with_marks=True), form
            reasons, _ = self._agree(found)
            self._timed = found if isinstance(found, Recording) and not reasons else None
        return recording

    def _agree(self, found: Recording | str, seconds: float = 0.0) -> tuple[list[str], float]:
        """The reasons of the ranks where a recording failed, and the longest time it took on a rank. All ranks."""
        of_ranks = self.world.gather_objects((found if isinstance(found, str) else None, seconds))
        return [reason for reason, _ in of_ranks if reason is not None], max(seconds for _, seconds in of_ranks)

    def _record(
        self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], *, with_marks: bool = False
    ) -> Recording | str:
        """Record a step without computing it, or return the reason why it cannot be recorded. All ranks."""
        host = HostState(self.model, outer_state(self.settings))
        # A recording that fails leaves the state of the generator unusable, so it gets a state of its own.
        generator = torch.cuda.default_generators[self.world.device.index]
        kept, own = generator.graphsafe_get_state(), generator.clone_state()
        generator.graphsafe_set_state(own)
        self._last = None
        # All recordings share memory: only one is replayed at a time, and none reads what another has left there.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            _check_inputs(inputs)
            copies = [map_tensors(one, torch.clone) for one in inputs]
            with self.clock.separate_marks(with_marks=with_marks) as marks:
                row = self.work(lanes, copies, partial(self._recording, graphs))
            if change := host.first_change():
                raise CannotRecord(f"the model changes {change} on the host, which a replay would not do again")
        except Exception as error:  # noqa: BLE001 - anything in a model that a recording does not allow
            generator.graphsafe_set_state(kept)
            host.restore()
            self._pool = None  # the failed recording may still hold it
            return first_cause(error)
        return Recording(graphs, tensors_in(copies), row, marks, own)

    @contextmanager
    def _recording(self, graphs: list[torch.cuda.CUDAGraph], lane: Lane) -> Iterator[None]:
        """Record one segment of a step, without computing it."""
        seed_generators(self.settings.seed, "forward", lane.step, lane.lane)
        before = _host_generators()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that pin memory or write a checkpoint, continue meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            yield
        if _host_generators() != before:
            raise CannotRecord("the model draws random numbers on the host, which a replay would not draw again")
        graphs.append(graph)

    def restart(self) -> None:
        """Forget what was recorded, because the step does something else from now on; on all ranks at the same step."""
        if self._recordings:
            torch.cuda.synchronize(self.world.device)  # a graph may still be running
        self._recordings, self._timed, self._timed_form, self._last = {}, None, None, None
        self._seen.clear()
        self.steps_to_wait = max(self.steps_to_wait, WARM_UP)

    def give_up(self, reason: str) -> None:
        """Run all further steps kernel by kernel; on all ranks at the same step."""
        self.is_given_up = True
        self.warn(f"steps are not CUDA graphs but run kernel by kernel: {reason}")


def form_of(tree: Any) -> Any:
    """The nesting, shapes and types of inputs, on which a recorded step depends; usable as a dict key."""
    return tuple(
        (path, (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf))
        for path, leaf in leaves_in(tree)
    )


def _check_inputs(tree: Any) -> None:
    """Raise CannotRecord for inputs that are not tensors: a replay can only read other tensors."""
    for _, leaf in leaves_in(tree, is_leaf=lambda node: isinstance(node, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            raise CannotRecord("a batch holds a packed sequence, whose lengths stay on the host")
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise CannotRecord(f"a batch holds a {type(leaf).__name__}, which is not a tensor")


def first_cause(error: BaseException) -> str:
    """The first error and its place in the user's code; the end of a recording that has failed raises another one."""
    while error.__context__ is not None and not error.__suppress_context__:  # `raise … from` has the better message
        error = error.__context__
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    place = user_location(error)
    return f"{text} ({place})" if place is not None and not isinstance(error, CannotRecord) else text


def _host_generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return torch.default_generator.get_state().tolist(), numpy[1].tolist(), numpy[2:], random.getstate()


class HostState:
    """The state of modules on the host: plain values, the tensors they hold, and the addresses of these."""

    def __init__(self, model: torch.nn.Module, loss: Any = None) -> None:
        """`loss` is included if it is a module."""
        self._modules = list(model.named_modules())
        if isinstance(loss, torch.nn.Module):
            self._modules += loss.named_modules(prefix="loss_fn")
        self._kept = [self._of(module) for _, module in self._modules]
        held = [(path, *named) for path, module in self._modules for named in _tensors_of(module)]
        self._memory = [(f"{path}.{name}".lstrip("."), tensor, tensor.data) for path, name, tensor in held]
        self._tables = [(table, dict(table)) for _, module in self._modules for table in _tables(module)]

    def first_change(self) -> str | None:
        """The name of the first value that has changed, if any."""
        for (path, module), kept in zip(self._modules, self._kept, strict=True):
            now = self._of(module)
            changed = [name for name in {**kept, **now} if name not in kept or not _is_same(now.get(name), kept[name])]
            if changed:
                return f"{path}.{changed[0]}".lstrip(".")
        return next((name for name, tensor, data in self._memory if tensor.data_ptr() != data.data_ptr()), None)

    def restore(self) -> None:
        """Restore all values and remove new ones: recorded tensors were never computed."""
        for table, kept in self._tables:
            for name in table.keys() - kept.keys():
                del table[name]
            table.update(kept)
        for _, tensor, data in self._memory:
            tensor.data = data

    @staticmethod
    def _of(module: torch.nn.Module) -> dict[str, Any]:
        # A tensor with a history belongs to its own step; one without may be what the next step reads.
        kinds = (bool, int, float, str)
        attributes = {
            name: value
            for name, value in vars(module).items()
            if value is None or isinstance(value, kinds) or (isinstance(value, torch.Tensor) and value.is_leaf)
        }
        return {**attributes, **module._parameters, **module._buffers}


def _tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a module keeps its attributes, parameters, buffers and submodules."""
    return [vars(module), module._parameters, module._buffers, module._modules]  # type: ignore[list-item]


def _tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of the module itself that are plain strided tensors."""
    own = {**module._parameters, **module._buffers}
    held = [(name, each) for name, each in own.items() if each is not None]
    return [(name, each) for name, each in held if type(each.data) is torch.Tensor and each.layout is torch.strided]


def _is_same(now: Any, kept: Any) -> bool:
    """Compare tensors by identity, because a replay writes to the recorded ones; other values by value."""
    if now is kept or isinstance(kept, torch.Tensor) or isinstance(now, torch.Tensor):
        return now is kept
    return type(now) is type(kept) and bool(now == kept)
