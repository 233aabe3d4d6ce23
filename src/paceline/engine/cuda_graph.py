"""A step as CUDA graphs: recorded once, then replayed, so that a step costs one launch for each lane.

There is one graph for each lane of this rank, because generators are keyed between lanes; the last one holds reduction
and update. All that changes from step to step is copied into the tensors that were recorded. Batches of other shapes
have recordings of their own, and one more has marks between its phases, for the clock.

Sums over ranks are part of a recording. NCCL wants all ranks to replay the same recording in the same step, or none, so
several ranks agree on what they do; a single rank is free.
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
from paceline.observe.failures import user_location
from paceline.world import World

# Steps before the recording: kernels are chosen and states made by then. DDP times its first ten.
WARM_UP, WARM_UP_IN_DDP = 3, 11
WORTH_IT = 3  # steps of another form, the last of which is recorded
MOST_FORMS = 64  # that are recorded
CHEAP = 500  # times as long as a recording takes: then there is time for one that is only for the clock

Work = Callable[..., torch.Tensor]


class CannotRecord(Exception):
    """Why a replay would not do what the step does."""


class Recording(NamedTuple):
    """A step for inputs of one form."""

    graphs: list[torch.cuda.CUDAGraph]  # one for each lane
    inputs: list[torch.Tensor]
    row: torch.Tensor
    marks: list[PhaseMark]  # between its phases, if it was made for the clock
    randomness: torch.Generator  # whose seed and offset its graphs read


class StepGraph:
    """Records a step of full lanes when it is warm, and replays it for all others like it."""

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
        say: Callable[[str], None],
    ) -> None:
        """`full_step` counts the samples of a step whose lanes are all full, over all ranks.

        `has_one_form` says that all such steps are known to have one form, `obstacle` why it cannot work, if that is
        known already; `say` takes the one line about it. All ranks.
        """
        self.work, self.model, self.settings, self.world, self.clock = work, model, settings, world, clock
        self.say, self.full_step = say, full_step
        self.steps_to_wait = WARM_UP_IN_DDP if is_in_ddp else WARM_UP
        self.is_given_up = False
        if obstacle is not None:
            self._give_up(obstacle)
        self._has_one_form = has_one_form
        self._recordings: dict[Any, Recording | None] = {}  # by form; None where it cannot be recorded
        self._seen: Counter[Any] = Counter()
        self._exchange = world.exchange() if world.size > 1 and not has_one_form and not self.is_given_up else None
        self._timed: Recording | None = None  # with marks, for the clock
        self._timed_form: Any = None  # of which it is, or would have been
        self._looks_to_wait = 0
        self._pool: Any = None
        self._last: Recording | None = None  # that was replayed, and not followed by another attempt to record

    def take(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> torch.Tensor | None:
        """The row of a step that was replayed; None if it must be taken eagerly. All ranks."""
        if self.is_given_up:
            return None
        row = self._take(lanes, inputs)
        if row is None:
            self.clock.discard_sample()  # its time is not like that of other steps
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
        for recorded, brought in zip(recording.inputs, tensors_in(inputs), strict=True):
            recorded.copy_(brought, non_blocking=True)
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
        """The first recording, at the same step on all ranks: it works on all of them, or is given up. All ranks."""
        began = perf_counter()
        found = self._record(lanes, inputs)
        reasons, seconds = self._agree(found, perf_counter() - began)
        if reasons:
            self._give_up(reasons[0])
        elif isinstance(found, Recording):
            self._recordings[form] = found
            self._looks_to_wait = int(CHEAP * seconds)  # the clock asks for a look about once a second

    def _record_another(self, form: Any, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> None:
        """For another form, when it has come several times; a single rank."""
        if len(self._recordings) >= MOST_FORMS:
            return
        self._seen[form] += 1
        if self._seen[form] < WORTH_IT:
            return
        found = self._record(lanes, inputs)
        if isinstance(found, str) and None not in self._recordings.values():
            self.say(f"steps with batches of some shapes are not CUDA graphs but go kernel by kernel: {found}")
        self._recordings[form] = None if isinstance(found, str) else found
        if len(self._recordings) == MOST_FORMS:
            self.say(f"batches have many shapes: {MOST_FORMS} are CUDA graphs now, steps of others go kernel by kernel")

    def _with_marks(
        self, form: Any, recording: Recording, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]
    ) -> Recording:
        """The recording with marks, if it is of this form; it is made when there has been time enough. All ranks."""
        self._looks_to_wait -= 1
        if self._timed is not None and self._timed_form == form:
            return self._timed
        self.clock.discard_sample()
        if self._timed_form is None and self._looks_to_wait < 0:
            found, self._timed_form = self._record(lanes, inputs, with_marks=True), form
            reasons, _ = self._agree(found)
            self._timed = found if isinstance(found, Recording) and not reasons else None
        return recording

    def _agree(self, found: Recording | str, seconds: float = 0.0) -> tuple[list[str], float]:
        """Why a recording has failed on some ranks, and the longest that it took on any. All ranks."""
        told = self.world.gather_objects((found if isinstance(found, str) else None, seconds))
        return [reason for reason, _ in told if reason is not None], max(seconds for _, seconds in told)

    def _record(
        self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], *, with_marks: bool = False
    ) -> Recording | str:
        """Record a step, or say why it cannot be. Nothing is computed by it."""
        host = HostState(self.model, self.settings.loss_fn)
        # A recording that fails leaves the state of the generator useless, so it is given a state of its own.
        generator = torch.cuda.default_generators[self.world.device.index]
        kept, own = generator.graphsafe_get_state(), generator.clone_state()
        generator.graphsafe_set_state(own)
        self._last = None
        # The same memory for all recordings: one is replayed at a time, and leaves nothing there for another.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            _check_inputs(inputs)
            copies = [map_tensors(one, torch.clone) for one in inputs]
            with self.clock.separate_marks(with_marks=with_marks) as marks:
                row = self.work(lanes, copies, partial(self._recording, graphs))
            if change := host.first_change():
                raise CannotRecord(f"the model changes {change} on the host, which a replay would not do again")
        except Exception as error:  # noqa: BLE001 - whatever a model does that a recording does not allow
            generator.graphsafe_set_state(kept)
            host.restore()
            self._pool = None  # one that has failed may hold on to it
            return _first_cause(error)
        return Recording(graphs, tensors_in(copies), row, marks, own)

    @contextmanager
    def _recording(self, graphs: list[torch.cuda.CUDAGraph], lane: Lane) -> Iterator[None]:
        """A segment of a step that is recorded, and not computed."""
        seed_generators(self.settings.seed, "forward", lane.step, lane.lane)
        before = _host_generators()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that pin memory or write a checkpoint, go on meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            yield
        if _host_generators() != before:
            raise CannotRecord("the model draws random numbers on the host, which a replay would not draw again")
        graphs.append(graph)

    def _give_up(self, reason: str) -> None:
        self.is_given_up = True
        self.say(f"steps are not CUDA graphs but go kernel by kernel: {reason}")


def form_of(tree: Any) -> Any:
    """What a recorded step depends on in its inputs: their nesting, shapes and types. It can be a key."""
    return tuple(
        (path, (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf))
        for path, leaf in leaves_in(tree)
    )


def _check_inputs(tree: Any) -> None:
    """A recording can be given other tensors, but nothing else."""
    for _, leaf in leaves_in(tree, is_leaf=lambda node: isinstance(node, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            raise CannotRecord("a batch holds a packed sequence, whose lengths stay on the host")
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise CannotRecord(f"a batch holds a {type(leaf).__name__}, which is not a tensor")


def _first_cause(error: BaseException) -> str:
    """What went wrong first, and where in the user's code: leaving a recording that has failed fails again."""
    while error.__context__ is not None and not error.__suppress_context__:  # `raise … from` has the better words
        error = error.__context__
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    place = user_location(error)
    return f"{text} ({place})" if place is not None and not isinstance(error, CannotRecord) else text


def _host_generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return torch.default_generator.get_state().tolist(), numpy[1].tolist(), numpy[2:], random.getstate()


class HostState:
    """What modules keep on the host: plain values, which tensors they hold, and where these are in memory."""

    def __init__(self, model: torch.nn.Module, loss: Any = None) -> None:
        """`loss` counts if it is a module, too."""
        self._modules = list(model.named_modules())
        if isinstance(loss, torch.nn.Module):
            self._modules += loss.named_modules(prefix="loss_fn")
        self._kept = [self._of(module) for _, module in self._modules]
        held = [(path, *named) for path, module in self._modules for named in _tensors_of(module)]
        self._memory = [(f"{path}.{name}".lstrip("."), tensor, tensor.data) for path, name, tensor in held]
        self._tables = [(table, dict(table)) for _, module in self._modules for table in _tables(module)]

    def first_change(self) -> str | None:
        """The name of something that is not as it was."""
        for (path, module), kept in zip(self._modules, self._kept, strict=True):
            now = self._of(module)
            changed = [name for name in {**kept, **now} if name not in kept or not _is_same(now.get(name), kept[name])]
            if changed:
                return f"{path}.{changed[0]}".lstrip(".")
        return next((name for name, tensor, data in self._memory if tensor.data_ptr() != data.data_ptr()), None)

    def restore(self) -> None:
        """Put everything back, and take away what is new: no recorded tensor has ever been computed."""
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
    """Where a module keeps what it holds."""
    return [vars(module), module._parameters, module._buffers, module._modules]  # type: ignore[list-item]


def _tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Its own parameters and buffers that are plain numbers in memory."""
    own = {**module._parameters, **module._buffers}
    held = [(name, each) for name, each in own.items() if each is not None]
    return [(name, each) for name, each in held if type(each.data) is torch.Tensor and each.layout is torch.strided]


def _is_same(now: Any, kept: Any) -> bool:
    """Tensors by identity, because a replay writes where the recorded ones lie; other values by value."""
    if now is kept or isinstance(kept, torch.Tensor) or isinstance(now, torch.Tensor):
        return now is kept
    return type(now) is type(kept) and bool(now == kept)
