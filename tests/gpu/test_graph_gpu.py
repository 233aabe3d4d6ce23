"""Steps as CUDA graphs, and data on the device: the same bits as kernel by kernel and through a DataLoader."""

from __future__ import annotations

import dataclasses
import random
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_models import Remembering, Teacher, conv_net
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from paceline import GradualUnfreeze, Trainer
from paceline.engine import compile_gain, phase, reduce
from paceline.engine.cuda_graph import Recording, StepGraph
from paceline.worker import build
from support.datasets import MapDataset, signed
from support.models import RunningLoss
from support.runs import events_of, warnings_in

Start = Callable[..., Any]
NOT_A_GRAPH = "steps are not CUDA graphs but run kernel by kernel: "


def images(size: int = 203) -> TensorDataset:
    return signed(size, 3, 8, 8)


def one_by_one() -> MapDataset:
    """The same samples, through a DataLoader."""
    return MapDataset(203, images().__getitem__)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Start]:
    """Trains in this process, as a world of one that torchrun has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.chdir(tmp_path)

    def run(model_fn: Any = conv_net, dataset_fn: Any = images, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "batch_size": 8, "lanes": 2, "num_epochs": 2, "optimizer": {"name": "adamw", "lr": 1e-2}, "device": "cuda",
            "metrics": ["accuracy"], "log": {"every_steps": 3}, "launcher": "torchrun",
            "loss_fn": nn.functional.cross_entropy,
        }  # fmt: skip
        return Trainer(model_fn, dataset_fn, **{**defaults, **options}).start()

    yield run
    if dist.is_initialized():  # after an error
        dist.destroy_process_group()


def all_of(result: Any) -> tuple[Any, ...]:
    return result.weights_sha256, result.ema_sha256, result.optimizer_sha256, result.history


def warnings_of(result: Any) -> list[str]:
    return warnings_in(result.run_dir)


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_graph_gives_the_bits_of_single_kernels(start: Start, precision: str, lanes: int) -> None:
    options: dict[str, Any] = {
        "precision": precision, "lanes": lanes, "ema": 0.9, "clip_norm": 0.5,
        "schedule": {"name": "cosine", "warmup_steps": 3},
    }  # fmt: skip
    replayed, again = start(**options), start(**options)
    eager = start(**options, step_mode="eager")
    assert all_of(replayed) == all_of(again) == all_of(eager)
    assert warnings_of(replayed) == []


@pytest.mark.parametrize(
    "optimizer",
    [{"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}, {"name": "adam"}, {"name": "muon", "lr": 0.02}],
    ids=lambda optimizer: optimizer["name"],
)
def test_other_optimizers_can_be_recorded_too(start: Start, optimizer: dict[str, Any]) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "schedule": {"name": "linear"}}
    replayed, eager = start(**options), start(**options, step_mode="eager")
    assert all_of(replayed) == all_of(eager)
    assert warnings_of(replayed) == []


def test_lanes_begin_with_the_buffers_of_the_steps_beginning_in_graphs_too(start: Start) -> None:
    replayed, eager = start(model_fn=Remembering), start(model_fn=Remembering, step_mode="eager")
    assert all_of(replayed) == all_of(eager)
    assert warnings_of(replayed) == []


def test_a_teacher_that_follows_in_forward_and_a_loss_with_a_buffer_are_recorded(start: Start) -> None:
    options: dict[str, Any] = {"model_fn": Teacher, "loss_fn": RunningLoss()}
    replayed, eager = start(**options), start(**options, step_mode="eager")
    assert all_of(replayed) == all_of(eager)
    assert warnings_of(replayed) == []


def test_a_teacher_in_new_memory_after_each_forward_is_not_recorded(start: Start) -> None:
    options: dict[str, Any] = {"model_fn": Teacher, "model_args": {"in_new_memory": True}}
    first, eager = start(**options), start(**options, step_mode="eager")
    assert all_of(first) == all_of(eager)
    [warning] = warnings_of(first)
    assert warning.startswith(f"{NOT_A_GRAPH}the model changes teacher.0.weight on the host")


def test_rows_on_the_device_and_a_dataloader_give_the_same_bits(start: Start) -> None:
    rows, loader = start(), start(dataset_fn=one_by_one)
    without, workers = start(data_on_device=0), start(dataset_fn=one_by_one, workers=2)
    assert all_of(rows) == all_of(loader) == all_of(without) == all_of(workers)


def test_augmentation_on_the_device_is_recorded(start: Start) -> None:
    augment = {"flip": "random", "translate": 2, "cutout": 2, "normalize": {"mean": [0.1] * 3, "std": [0.9] * 3}}
    rows, eager = start(augment=augment), start(augment=augment, step_mode="eager")
    assert all_of(rows) == all_of(eager) == all_of(start(augment=augment, dataset_fn=one_by_one))
    assert all_of(rows) != all_of(start())


class Sequences(Dataset[Any]):
    """Of several lengths, packed."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3 + index % 4, 6, generator=generator), index % 2

    def collate_fn(self, samples: Any) -> tuple[Any, torch.Tensor]:
        sequences, classes = zip(*samples, strict=True)
        return nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False), torch.tensor(classes)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrence, self.last = nn.LSTM(6, 8), nn.Linear(8, 2)

    def forward(self, packed: Any) -> torch.Tensor:
        output: torch.Tensor = self.last(self.recurrence(packed)[1][0][-1])
        return output


def test_packed_sequences_keep_their_lengths_on_the_host_and_go_kernel_by_kernel(start: Start) -> None:
    first, second = (start(model_fn=Recurrent, dataset_fn=Sequences) for _ in range(2))
    assert all_of(first) == all_of(second)
    assert warnings_of(first) == [f"{NOT_A_GRAPH}a batch holds a packed sequence, whose lengths stay on the host"]


def test_torchmetrics_are_computed_on_the_host_without_communication(start: Start) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    result = start(metrics={"f1": torchmetrics.F1Score(task="multiclass", num_classes=2)}, val_fraction=0.2)
    assert 0 <= result.metrics["f1"] <= 1


def test_losses_that_count_by_themselves_are_recorded(start: Start) -> None:
    def tokens(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(output, target, reduction="sum"), (target >= 0).sum()

    assert all_of(start(loss_fn=tokens)) == all_of(start(loss_fn=tokens, step_mode="eager"))


@pytest.mark.parametrize("way", ["at once", "as integers", "in bf16"])
def test_ddp_can_be_recorded(start: Start, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The code path of several GPUs: steps use DDP, its buckets, and NCCL with a single rank."""
    hooks = []

    class InDdp(phase.Backward):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "through_ddp": True})
            if way == "as integers":
                self.reduction._queues = [reduce.RankQueue(self.world)]
            self.reduction.compression = "bf16" if way == "in bf16" else "none"
            hooks.append(self.hook)

    def start_at_any_size(self: reduce.Reduction, *args: Any, **options: Any) -> reduce.Future:
        self.world = dataclasses.replace(self.world, size=2)
        return sums(self, *args, **options)

    sums = reduce.Reduction.start
    keys = {"num_epochs": 3, "lanes": 3 if way == "as integers" else 2}
    wanted = start(**keys)
    monkeypatch.setattr(phase, "Backward", InDdp)
    monkeypatch.setattr(build, "replicate", partial(build.replicate, through_ddp=True))
    monkeypatch.setattr(reduce.Reduction, "start", start_at_any_size)
    replayed, eager = start(**keys), start(**keys, step_mode="eager")
    assert all(hook is not None for hook in hooks)
    assert warnings_of(replayed) == []
    assert all_of(replayed) == all_of(eager)
    assert (all_of(replayed) == all_of(wanted)) is (way != "in bf16")  # which rounds


class Sentences(Dataset[Any]):
    """Of 1 to 40 words; batches are about as long as the longest."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, 41, (403,), generator=generator).tolist()
        self.words = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.words[index], int(self.words[index].sum() % 2)

    @staticmethod
    def collate_fn(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(words) for words, _ in samples) // 8 * 8 + 8
        ids = torch.stack([nn.functional.pad(words, (0, width - len(words))) for words, _ in samples])
        return ids, torch.tensor([label for _, label in samples])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(50, 32), nn.Dropout(0.3), nn.Linear(32, 2)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.dropout(self.embedding(ids)).mean(1))


@pytest.mark.parametrize("lanes", [1, 2])
def test_each_shape_has_a_recording_with_the_same_bits(start: Start, monkeypatch: Any, lanes: int) -> None:
    recorded, replays = [], []
    record, replay = StepGraph._record, StepGraph._replay
    monkeypatch.setattr(StepGraph, "_record", lambda *a, **k: recorded.append(record(*a, **k)) or recorded[-1])
    monkeypatch.setattr(StepGraph, "_replay", lambda *a: replays.append(1) or replay(*a))
    options: dict[str, Any] = {"lanes": lanes, "num_epochs": 6, "batch_size": 4}
    replayed = start(Reader, Sentences, **options)
    assert len(recorded) > 3
    assert all(isinstance(each, Recording) for each in recorded)
    assert len(replays) > replayed.step / 2
    assert all_of(replayed) == all_of(start(Reader, Sentences, **options, step_mode="eager"))
    assert warnings_of(replayed) == []


def test_a_shape_that_cannot_be_recorded_leaves_the_others_as_they_are(start: Start, monkeypatch: Any) -> None:
    class Shy(Reader):
        width = 0

        def forward(self, ids: torch.Tensor) -> Any:
            return super().forward(ids) * (2 if ids.shape[1] == self.width and ids.sum().item() < 0 else 1)

    recorded: list[Any] = []
    record = StepGraph._record
    monkeypatch.setattr(StepGraph, "_record", lambda *a, **k: recorded.append(record(*a, **k)) or recorded[-1])
    options: dict[str, Any] = {"lanes": 1, "num_epochs": 6, "batch_size": 4}
    assert warnings_of(start(Shy, Sentences, **options)) == []
    Shy.width = recorded[1].inputs[0].shape[1]
    recorded.clear()
    tried = start(Shy, Sentences, **options)
    assert [isinstance(found, Recording) for found in recorded[:3]] == [True, False, True]
    [warned] = warnings_of(tried)
    assert warned.startswith("steps with batches of some shapes are not CUDA graphs but run kernel by kernel: ")
    assert all_of(tried) == all_of(start(Shy, Sentences, **options, step_mode="eager"))


def test_a_step_that_is_timed_has_the_same_bits_and_reports_its_phases(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = start(num_epochs=6)
    monkeypatch.setattr("paceline.worker.step_log.SAMPLE_S", 0.0)
    monkeypatch.setattr("paceline.engine.cuda_graph.RECORDING_COST_FACTOR", 0)
    timed = start(num_epochs=6)
    assert all_of(timed) == all_of(wanted)
    known = [event["phase_ms"] for event in events_of(timed.run_dir, "pace") if len(event["phase_ms"]) > 1]
    assert len(known) > 5
    for phases in known:
        assert phases["reduction"] == [0]
        assert all(phases[name][0] > 0 for name in ("forward", "backward", "optimizer"))


# --- numbers that are not finite -------------------------------------------------------------------------------------


def test_the_device_skips_bad_steps_as_the_host_does(start: Start) -> None:
    def spoilt() -> TensorDataset:
        samples = images()
        samples.tensors[0][17] = torch.nan
        return samples

    options: dict[str, Any] = {"dataset_fn": spoilt, "val_fraction": 0, "batch_size": 4, "num_epochs": 3}
    replayed, eager = start(**options), start(**options, step_mode="eager")
    by_host = start(**options, optimizer={"name": "adamw", "lr": 1e-2, "foreach": True})
    assert all_of(replayed) == all_of(eager)
    warned = [text for text in warnings_of(replayed) if "is skipped" in text]
    assert warned == [text for text in warnings_of(eager) if "is skipped" in text]
    assert [text for text in warnings_of(by_host) if "is skipped" in text] == warned
    assert len(warned) == 3
    assert "17" in warned[0]
    assert all(value.isfinite().all() for value in replayed.load_model().state_dict().values())


# --- models that cannot be recorded ----------------------------------------------------------------------------------


class Asks(nn.Module):
    """Looks at a number on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout = conv_net(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.dropout(x)) * (2 if x.mean().item() > 100 else 1)


class Draws(Asks):
    """Draws a random number on the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.dropout(x)) * (0.9 + 0.2 * random.random())


class Counts(Asks):
    """Counts its calls, and does something else in every fifth."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(self.dropout(x)) * (0.5 if self.calls % 5 == 0 else 1)


class Replaces(Asks):
    """Puts another tensor in its buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.net(self.dropout(x - self.mean))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Asks, "operation not permitted when stream is capturing"),
        (Draws, "the model draws random numbers on the host"),
        (Counts, "the model changes calls on the host"),
        (Replaces, "the model changes mean on the host"),
    ],
)
def test_a_model_that_cannot_be_recorded_trains_kernel_by_kernel_with_a_reason(
    start: Start, model: type[nn.Module], reason: str
) -> None:
    tried, eager = start(model, lanes=1), start(model, lanes=1, step_mode="eager")
    [warned] = warnings_of(tried)
    assert warned.startswith(NOT_A_GRAPH)
    assert reason in warned
    assert all_of(tried) == all_of(eager)
    assert warnings_of(eager) == []


def test_a_model_that_flattens_with_view_trains(start: Start) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.filters(x).view(-1, 256))

    assert all_of(start(Views)) == all_of(start(Views, channels_last=False))


def test_fp16_and_optimizers_of_the_host_say_why_there_is_no_graph(start: Start) -> None:
    assert "precision=fp16" in warnings_of(start(precision="fp16"))[0]
    assert "Adam, as it is set, cannot skip" in warnings_of(start(optimizer={"name": "adam", "foreach": True}))[0]
    assert "Adagrad, as it is set" in warnings_of(start(optimizer={"name": "adagrad"}))[0]


def test_a_model_that_asks_whether_it_is_recorded_has_one_hash_wherever_the_recording_begins(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chooses(Asks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.dropout(x)) * (0.9 if torch.cuda.is_current_stream_capturing() else 1.1)

    early = start(Chooses)
    monkeypatch.setattr("paceline.engine.cuda_graph.WARM_UP", 9)
    late = start(Chooses)
    assert all_of(early) == all_of(late)
    assert warnings_of(early) == warnings_of(late) == []


@pytest.mark.filterwarnings("default")  # of torch's own compiler
def test_compiled_steps_are_recorded_and_repeatable(start: Start) -> None:
    compiled = start(step_mode="compile")
    assert all_of(compiled) == all_of(start(step_mode="compile"))
    assert warnings_of(compiled) == []


@pytest.mark.filterwarnings("default")
def test_auto_compiles_where_it_is_worth_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, recorded = start(step_mode="compile"), start()
    monkeypatch.setattr(compile_gain, "SAVED_S_PER_BYTE", 1.0)
    assert all_of(start()) == all_of(compiled) != all_of(recorded)


# --- schedules and callbacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": "onecycle"},
        {"schedule_fn": lambda step, total_steps: 1 / (1 + step)},
        {"scheduler_fn": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)},
    ],
    ids=["schedule", "schedule_fn", "scheduler_fn"],
)
def test_a_graph_reads_the_learning_rate_of_each_step(start: Start, keys: dict[str, Any]) -> None:
    replayed, eager = start(**keys), start(**keys, step_mode="eager")
    assert all_of(replayed) == all_of(eager)
    assert warnings_of(replayed) == []


def test_a_scheduler_that_sets_momentum_takes_steps_kernel_by_kernel(start: Start) -> None:
    def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)

    result, eager = start(scheduler_fn=one_cycle), start(scheduler_fn=one_cycle, step_mode="eager")
    assert all_of(result) == all_of(eager)
    assert warnings_of(result) == [
        NOT_A_GRAPH + "scheduler_fn sets options of the optimizer besides lr, which a recording would repeat"
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_are_recorded_again_when_parameters_are_unfrozen(
    start: Start, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, record = [], StepGraph._record
    monkeypatch.setattr(StepGraph, "_record", lambda self, *a, **k: recorded.append(1) or record(self, *a, **k))
    parts = [name for name, part in conv_net().named_children() if any(True for _ in part.parameters())]
    options: dict[str, Any] = {
        "optimizer": {"name": optimizer, "lr": 1e-2}, "num_epochs": 4, "clip_norm": 0.5, "ema": 0.9,
        "callbacks": [GradualUnfreeze(*parts[:2], every_epochs=1)],
    }  # fmt: skip
    replayed = start(**options)
    assert len(recorded) >= 3  # with two parts, one part, and none of them frozen
    assert all_of(replayed) == all_of(start(**options, step_mode="eager"))
    assert warnings_of(replayed) == []
