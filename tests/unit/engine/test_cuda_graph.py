"""Steps as CUDA graphs: what needs no GPU. When a step is recorded, what cannot be, and what is put back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from paceline.config import Config
from paceline.data.feed import LaneInputs
from paceline.data.lanes import Lane
from paceline.engine.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, DeviceClock
from paceline.engine.cuda_graph import (
    MAX_FORMS,
    RECORD_AT,
    WARM_UP,
    WARM_UP_IN_DDP,
    AsRecorded,
    CannotRecord,
    HostState,
    Recording,
    StepGraph,
    _check_inputs,
    first_cause,
    form_of,
)
from support.worlds import fake_world, world_of

BATCH, LANES = 4, 2
MakeConfig = Callable[..., Config]


class Pair(NamedTuple):
    x: Any
    y: Any


# --- the form of inputs ---------------------------------------------------------------------------------------------


def nested(x: torch.Tensor, y: Any) -> list[LaneInputs]:
    return [LaneInputs({"x": x, "more": (y, None)}, torch.arange(4), torch.tensor(0))]


def test_other_values_have_the_same_form() -> None:
    assert form_of(nested(torch.zeros(4, 2), torch.ones(4))) == form_of(nested(torch.ones(4, 2), torch.zeros(4)))


@pytest.mark.parametrize(
    "other",
    [
        nested(torch.zeros(4, 3), torch.ones(4)),
        nested(torch.zeros(4, 2, dtype=torch.float64), torch.ones(4)),
        nested(torch.zeros(4, 2, device="meta"), torch.ones(4)),
        nested(torch.zeros(4, 2), None),
        nested(torch.zeros(4, 2), [torch.ones(4)]),
        nested(torch.zeros(4, 2), {"y": torch.ones(4)}),
        nested(torch.zeros(4, 2), torch.ones(4)) * 2,
        [LaneInputs({"z": torch.zeros(4, 2), "more": (torch.ones(4), None)}, torch.arange(4), torch.tensor(0))],
        [LaneInputs({"x": torch.zeros(4, 2), "more": (torch.ones(4), None)}, torch.arange(4), None)],
    ],
    ids=["shape", "dtype", "device", "none", "list", "dict", "lanes", "key", "epoch"],
)
def test_other_shapes_types_and_nestings_are_another_form(other: Any) -> None:
    assert form_of(other) != form_of(nested(torch.zeros(4, 2), torch.ones(4)))


def test_only_tensors_can_be_given_to_a_recording() -> None:
    _check_inputs([LaneInputs({"x": [torch.zeros(1)], "y": Pair(torch.zeros(1), None)}, None, None)])
    for thing, name in (("text", "str"), (3, "int"), (1.5, "float")):
        with pytest.raises(CannotRecord, match=rf"a batch holds a {name}, which is not a tensor"):
            _check_inputs([LaneInputs({"x": [torch.zeros(1), (thing,)]}, None, None)])


# --- what a model keeps on the host ---------------------------------------------------------------------------------


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.calls, self.length, self.scale, self.mode = 0, 5000, 0.1, "plain"
        self.limit = math.inf
        self.cache: Any = None
        self.seen: Any = [1]
        self.hidden = torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))


def change_call(model: Keeping) -> None:
    model.calls += 1


def change_mode(model: Keeping) -> None:
    model.mode = "other"


def change_inner(model: Keeping) -> None:
    model.net[1].momentum = 0.5


def change_truth(model: Keeping) -> None:
    model.calls = False


def change_buffer(model: Keeping) -> None:
    model.mean = model.mean + 1


def change_new(model: Keeping) -> None:
    model.fresh = 3


def change_cache(model: Keeping) -> None:
    model.cache = torch.zeros(3)


def change_hidden(model: Keeping) -> None:
    model.hidden = model.hidden + 1


def change_parameter(model: Keeping) -> None:
    model.net[0].weight = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (change_call, "calls"), (change_mode, "mode"), (change_inner, "net.1.momentum"), (change_truth, "calls"),
        (change_buffer, "mean"), (change_new, "fresh"), (change_cache, "cache"), (change_hidden, "hidden"),
        (change_parameter, "net.0.weight"),
    ],
)  # fmt: skip
def test_what_a_model_changes_on_the_host_is_named_and_put_back(change: Callable[[Keeping], None], name: str) -> None:
    model = Keeping()
    holds = [dict(vars(module)) | dict(module._buffers) | dict(module._parameters) for module in model.modules()]
    host = HostState(model)
    assert host.first_change() is None
    change(model)
    assert host.first_change() == name
    host.restore()
    assert host.first_change() is None
    after = [dict(vars(module)) | dict(module._buffers) | dict(module._parameters) for module in model.modules()]
    assert [list(table) for table in after] == [list(table) for table in holds]
    assert all(now[key] is kept[key] for now, kept in zip(after, holds, strict=True) for key in kept)


def test_memory_that_a_model_replaces_is_named_and_put_back() -> None:
    """A replay would read the old memory and write to the new: `p.data = m * p.data + (1 - m) * q.data`."""
    model, loss = Keeping(), nn.BatchNorm1d(2)
    host = HostState(model, loss)
    weight, kept = model.net[0].weight, model.net[0].weight.data
    weight.data = 0.5 * weight.data
    assert host.first_change() == "net.0.weight"
    host.restore()
    assert model.net[0].weight is weight
    assert weight.data_ptr() == kept.data_ptr()
    assert host.first_change() is None
    loss.momentum = 0.3
    assert host.first_change() == "loss_fn.momentum"
    assert HostState(model, nn.functional.cross_entropy).first_change() is None


def test_values_that_are_set_again_and_tensors_that_change_in_place_are_no_change() -> None:
    model = Keeping()
    host = HostState(model)
    model.length, model.scale = int("5000"), float("0.1")  # equal, but other objects
    model.limit = float("inf")
    model.mean.add_(1)
    model.hidden.add_(1)
    model.mode = "".join(["pl", "ain"])
    assert host.first_change() is None


def test_a_tensor_with_a_history_belongs_to_its_step() -> None:
    """As old weight_norm sets its weight before each forward pass, and as models keep a part of their loss."""
    model = Keeping()
    model.part_of_loss = model.net[0].weight.sum()
    host = HostState(model)
    model.part_of_loss = model.net[0].weight.sum()
    assert host.first_change() is None


def test_a_failed_recording_leaves_nothing_behind() -> None:
    model = Keeping()
    host = HostState(model)
    model.seen = [torch.zeros(1)]
    model.memo = {"x": torch.zeros(1)}
    model.late = nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros(1))
    host.restore()
    assert model.seen == [1]
    assert not any(hasattr(model, name) for name in ("memo", "late", "count"))
    assert list(model.state_dict()) == list(Keeping().state_dict())


# --- the first cause ------------------------------------------------------------------------------------------------


def test_the_first_cause_is_reported_with_the_users_line() -> None:
    def user() -> None:
        json.loads("nothing")

    def leave() -> None:
        try:
            user()
        finally:
            raise RuntimeError("capturing has failed")  # as leaving a recording does

    with pytest.raises(RuntimeError) as caught:
        leave()
    line = user.__code__.co_firstlineno + 1  # neither json's own line nor what json itself came across
    assert first_cause(caught.value) == f"Expecting value: line 1 column 1 (char 0) ({__file__}:{line})"


def test_torchs_own_lines_are_not_the_users() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 2))
    line = caught.tb.tb_lineno
    assert first_cause(caught.value).endswith(f"({__file__}:{line})")


def test_what_we_say_ourselves_needs_no_line() -> None:
    with pytest.raises(CannotRecord) as caught:
        _check_inputs("text")
    assert first_cause(caught.value) == "a batch holds a str, which is not a tensor"
    assert first_cause(KeyError()) == "KeyError"
    assert first_cause(ValueError("one\ntwo")) == "one"


# --- when a step is recorded and replayed ---------------------------------------------------------------------------


class Fake(StepGraph):
    """Records and replays nothing, but keeps a list of these calls."""

    def __init__(
        self,
        config: Config,
        *,
        obstacle: str | None = None,
        is_in_ddp: bool = False,
        ranks: int = 1,
        has_one_form: bool | None = None,
        exchanged: Callable[..., list[int]] | None = None,
    ) -> None:
        """Batches may have several forms on a single rank, unless `has_one_form` is given."""
        self.warned, self.done, self.reason = list[str](), list[str](), None
        world = fake_world(size=ranks, exchanged=exchanged)
        super().__init__(
            lambda *_: torch.zeros(1), nn.Linear(1, 1), config, world, DeviceClock(is_alone=ranks == 1),
            full_step=BATCH * LANES * ranks, has_one_form=ranks > 1 if has_one_form is None else has_one_form,
            obstacle=obstacle, is_in_ddp=is_in_ddp, warn=self.warned.append,
        )  # fmt: skip

    def _record(
        self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], *, with_marks: bool = False
    ) -> Recording | str:
        self.done.append("record with marks" if with_marks else "record")
        marks: Any = ["mark"] if with_marks else []
        return self.reason or Recording([], [], torch.zeros(1), marks, torch.Generator())

    def _replay(self, recording: Recording, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> torch.Tensor:
        self.done.append("replay with marks" if recording.marks else "replay")
        return torch.ones(1)

    def take_step(self, *, samples: int = BATCH, width: int = 3, step_samples: int | None = None) -> bool:
        """Whether the step was replayed."""
        total = step_samples if step_samples is not None else samples * LANES
        lanes = [Lane(0, lane, samples, total, list(range(samples))) for lane in range(LANES)]
        return self.take(lanes, [LaneInputs((torch.zeros(samples, width),), None, None)] * LANES) is not None


@pytest.mark.parametrize(("is_in_ddp", "steps"), [(False, WARM_UP), (True, WARM_UP_IN_DDP)])
def test_a_step_is_recorded_once_after_those_that_warm_up(make_config: MakeConfig, is_in_ddp: bool, steps: int) -> None:
    graph = Fake(make_config(batch_size=BATCH), is_in_ddp=is_in_ddp)
    assert [graph.take_step() for _ in range(steps + 3)] == [False] * steps + [True] * 3
    assert graph.done == ["record", "replay", "replay", "replay"]
    assert graph.warned == []


def test_short_steps_are_taken_eagerly_and_do_not_count(make_config: MakeConfig) -> None:
    graph = Fake(make_config(batch_size=BATCH))
    for _ in range(WARM_UP):
        assert not graph.take_step(samples=BATCH - 1)
        assert not graph.take_step()
    assert not graph.take_step(samples=BATCH - 1)
    assert graph.done == []
    assert graph.take_step()
    assert not graph.take_step(samples=BATCH - 1)
    assert graph.take_step()


def test_a_step_that_is_short_on_another_rank_is_short_here(make_config: MakeConfig) -> None:
    """Or one rank would wait for the others in a recording that they do not make."""
    graph = Fake(make_config(batch_size=BATCH), ranks=2)
    full = BATCH * LANES * 2
    for _ in range(WARM_UP + 2):
        assert not graph.take_step(step_samples=full - 1)  # this rank's lanes are full
    assert graph.steps_to_wait == WARM_UP
    assert [graph.take_step(step_samples=full) for _ in range(WARM_UP + 1)] == [False] * WARM_UP + [True]


def test_batches_of_another_form_are_recorded_when_they_have_occurred_several_times(make_config: MakeConfig) -> None:
    graph = Fake(make_config(batch_size=BATCH))
    assert [graph.take_step() for _ in range(WARM_UP + 1)][-1]
    assert [graph.take_step(width=5) for _ in range(RECORD_AT + 1)] == [False] * (RECORD_AT - 1) + [True] * 2
    assert graph.take_step()
    assert graph.done == ["record", "replay", "record", "replay", "replay", "replay"]


def test_there_is_an_end_to_recordings(make_config: MakeConfig) -> None:
    graph = Fake(make_config(batch_size=BATCH))
    for _ in range(WARM_UP + RECORD_AT):
        steps = [graph.take_step(width=width) for width in range(1, MAX_FORMS + 6)]
    assert sum(steps) == MAX_FORMS


def test_another_form_that_cannot_be_recorded_runs_eagerly_with_one_warning(make_config: MakeConfig) -> None:
    graph = Fake(make_config(batch_size=BATCH))
    for _ in range(WARM_UP + 1):
        graph.take_step()
    graph.reason = "no room"
    assert not any(graph.take_step(width=width) for width in (5, 6) for _ in range(RECORD_AT + 2))
    assert graph.take_step()
    assert graph.done.count("record") == 3
    assert graph.warned == ["steps with batches of some shapes are not CUDA graphs but run kernel by kernel: no room"]


def test_several_ranks_replay_one_form_only_and_all_of_them_or_none(make_config: MakeConfig) -> None:
    """NCCL wants all ranks to replay the same recording, or none."""
    other = 0
    graph = Fake(make_config(batch_size=BATCH), ranks=2, has_one_form=False, exchanged=lambda mine: [max(mine, other)])
    full = BATCH * LANES * 2
    assert [graph.take_step(step_samples=full) for _ in range(WARM_UP + 2)][-2:] == [True, True]
    assert not any(graph.take_step(step_samples=full, width=5) for _ in range(RECORD_AT + 1))
    assert graph.take_step(step_samples=full)
    other = 1  # the other rank has another form
    assert not graph.take_step(step_samples=full)
    assert graph.done.count("record") == 1


def test_a_step_is_recorded_with_marks_once_there_was_time_for_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Fake(make_config(batch_size=BATCH))
    monkeypatch.setattr(DeviceClock, "is_sampling", True)
    assert [graph.take_step() for _ in range(WARM_UP)] == [False] * WARM_UP
    monkeypatch.setattr("paceline.engine.cuda_graph.RECORDING_COST_FACTOR", 0)
    graph.take_step()
    graph._looks_to_wait = 1
    for _ in range(3):
        graph.take_step()
    assert [graph.take_step(width=5) for _ in range(RECORD_AT)][-1]  # of which there is none with marks
    monkeypatch.setattr(DeviceClock, "is_sampling", False)
    graph.take_step()
    assert graph.done == [
        "record", "record with marks", "replay",  # nothing was waited for
        "replay with marks", "replay with marks", "replay with marks", "record", "replay", "replay",
    ]  # fmt: skip


def test_a_recording_with_marks_that_fails_is_not_tried_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.cuda_graph.RECORDING_COST_FACTOR", 0)
    graph = Fake(make_config(batch_size=BATCH))
    for _ in range(WARM_UP + 1):
        graph.take_step()
    monkeypatch.setattr(DeviceClock, "is_sampling", True)
    graph.reason = "no room"
    assert all(graph.take_step() for _ in range(3))
    assert graph.done.count("record with marks") == 1
    assert graph.done[-3:] == ["replay"] * 3


def test_a_recording_that_fails_warns_once_and_is_not_tried_again(make_config: MakeConfig) -> None:
    graph = Fake(make_config(batch_size=BATCH))
    graph.reason = "the model is shy"
    assert not any(graph.take_step() for _ in range(WARM_UP + 4))
    assert graph.done == ["record"]
    assert graph.warned == ["steps are not CUDA graphs but run kernel by kernel: the model is shy"]


def test_an_obstacle_is_reported_at_once_and_nothing_is_tried(make_config: MakeConfig) -> None:
    graph = Fake(make_config(batch_size=BATCH), obstacle="gloo sums on the host")
    assert graph.warned == ["steps are not CUDA graphs but run kernel by kernel: gloo sums on the host"]
    assert not any(graph.take_step() for _ in range(WARM_UP + 2))
    assert graph.done == []
    assert len(graph.warned) == 1


# --- the whole of it, on a device that only pretends ------------------------------------------------------------------


class Device:
    """Stands for what torch.cuda does: keeps states of generators, and notes recordings, replays and events."""

    def __init__(self) -> None:
        self.state, self.log, self.recording, self.seeds, self.ms = "state", list[str](), None, list[int](), 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Graph:
            def __init__(self) -> None:
                self.events: list[Any] = []

            def replay(self) -> None:
                device.log.append("replay")
                for event in self.events:
                    event.pass_by()

        class Event:
            def __init__(self, **options: bool) -> None:
                self.ms = -1.0

            def record(self) -> None:
                device.recording.events.append(self) if device.recording else self.pass_by()

            def pass_by(self) -> None:
                device.ms += 1
                self.ms = device.ms

            def synchronize(self) -> None:
                assert self.ms > 0

            def elapsed_time(self, later: Event) -> float:
                assert 0 < self.ms < later.ms
                return later.ms - self.ms

        @contextmanager
        def graph(made: Any, **options: Any) -> Iterator[None]:
            device.recording = made
            device.log.append(f"record in {options['pool']}")
            try:
                yield
            finally:
                device.recording = None

        generator = SimpleNamespace(
            graphsafe_get_state=lambda: self.state,
            graphsafe_set_state=lambda state: setattr(self, "state", state),
            clone_state=lambda: f"{self.state}'",
            manual_seed=lambda seed: self.seeds.append(seed),
        )
        pools = (f"pool {number}" for number in range(9))
        for name, value in {
            "default_generators": (generator,), "CUDAGraph": Graph, "Event": Event, "graph": graph,
            "graph_pool_handle": lambda: next(pools), "current_stream": lambda: "stream",
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


class Work:
    """A step that marks its phases; with inputs of some width it cannot be recorded."""

    def __init__(self, clock: DeviceClock, device: Device) -> None:
        self.clock, self.device, self.shy = clock, device, 0

    def __call__(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], segment: Any) -> torch.Tensor:
        for lane, brought in zip(lanes, inputs, strict=True):
            with segment(lane):
                self.clock.enter(FORWARD)
                if brought.data[0].shape[1] == self.shy and self.device.recording:
                    raise RuntimeError("operation not permitted")
                self.clock.enter(BACKWARD)
                if lane is lanes[-1]:
                    self.clock.enter(OPTIMIZER)
        return torch.zeros(1)


def test_recordings_are_made_and_replayed_with_their_own_randomness_and_inputs(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, message = Device(), list[str]()
    device.install(monkeypatch)
    monkeypatch.setattr("paceline.engine.cuda_graph.RECORDING_COST_FACTOR", 0)
    clock = DeviceClock(is_alone=True)
    work, world = Work(clock, device), world_of(device="cuda:0")
    graph = StepGraph(
        work, nn.Linear(1, 1), make_config(batch_size=BATCH), world, clock,
        full_step=BATCH * LANES, has_one_form=False, obstacle=None, is_in_ddp=False, warn=message.append,
    )  # fmt: skip

    def take_step(width: int, value: float = 0.0) -> bool:
        lanes = [Lane(0, lane, BATCH, BATCH * LANES, list(range(BATCH))) for lane in range(LANES)]
        inputs = [LaneInputs((torch.full((BATCH, width), value),), None, None) for _ in lanes]
        clock.enter(FORWARD)
        is_replayed = graph.take(lanes, inputs) is not None
        if not is_replayed:
            work(lanes, inputs, lambda lane: nullcontext())
        clock.enter(OTHER)
        clock.enter(DATA)
        return is_replayed

    assert [take_step(3) for _ in range(WARM_UP + 1)] == [False] * WARM_UP + [True]
    assert device.log == ["record in pool 0"] * LANES + ["replay"] * LANES
    assert device.state == "state'"

    work.shy = 4  # fails, and leaves the memory that it was recorded in to others
    assert not any(take_step(4) for _ in range(RECORD_AT + 1))
    [warning] = message
    assert "shapes are not CUDA graphs but run kernel by kernel: operation not permitted" in warning
    assert [take_step(5) for _ in range(RECORD_AT)][-1]
    assert device.log[-LANES - 1] == "record in pool 1"
    other = device.state
    assert other != "state'"
    assert take_step(3, value=7.0)
    assert device.state == "state'"
    form = next(iter(graph._recordings))
    assert all(torch.equal(tensor, torch.full((BATCH, 3), 7.0)) for tensor in graph._recordings[form].inputs)
    assert take_step(5)
    assert device.state == other

    clock.sample_next_step()
    take_step(3)
    take_step(3)  # is recorded with marks, and replayed without
    assert math.isnan(clock.mean_ms(1)[-1])
    clock.sample_next_step()
    take_step(3)
    take_step(3)
    assert clock.mean_ms(1)[2:] == [LANES + 1, LANES, 0, 1, 1]
    clock.sample_next_step()
    take_step(3)
    take_step(5)  # of which there is none with marks
    assert clock.mean_ms(1)[2:] == [LANES + 1, LANES, 0, 1, 1]


# --- the same answer before and after the recording -------------------------------------------------------------------


def test_code_that_asks_whether_it_is_recorded_gets_one_answer_in_all_steps() -> None:
    before = torch.cuda.is_current_stream_capturing
    as_recorded = AsRecorded()
    for _ in range(2):
        with as_recorded:
            assert torch.cuda.is_current_stream_capturing()
    with pytest.raises(ZeroDivisionError), as_recorded:
        raise ZeroDivisionError
    assert torch.cuda.is_current_stream_capturing is before


def test_models_of_transformers_choose_the_kernels_of_a_recording() -> None:
    utils = pytest.importorskip("transformers.utils.import_utils")
    if not hasattr(utils, "is_cuda_stream_capturing"):
        pytest.skip("this version of transformers does not ask")
    assert not utils.is_tracing()
    with AsRecorded():
        assert utils.is_tracing()
