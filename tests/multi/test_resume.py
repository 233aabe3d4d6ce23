"""A run that resumes: in the middle of an epoch, on other numbers of ranks, to the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness_cases import ODD, Images, Scaled, Teacher, conv_net, layer_net
from faults import Disturbed, events, options, outcome, saved_steps, send, send_self, start, stop_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline import Trainer
from paceline.checkpoint import interval, save_clock
from paceline.errors import CheckpointsDamaged, ConfigError, RankFailed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(start(run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run")))


def stopping(visit: int, number: signal.Signals = signal.SIGTERM) -> Any:
    """A data set that asks for a stop in epoch `visit`; the test itself is the launcher."""
    log, launcher = Path("fetched").resolve(), os.getpid()
    return lambda: Disturbed(log, [visit], send(number, launcher))


@pytest.mark.parametrize(
    ("before", "after", "visit", "sharded"), [(1, 4, 1, "after"), (4, 3, 2, "before"), (3, 1, 3, "never")]
)
def test_a_resized_run_ends_with_the_same_bits(
    undisturbed: dict, before: int, after: int, visit: int, sharded: str
) -> None:
    """Whether its optimizer is sharded may change, too."""
    stopped_at = stop_step(
        dataset_fn=stopping(visit), procs=before, workers=2 if before == 3 else 0,
        shard_optimizer=sharded == "before",
    )  # fmt: skip
    assert 0 < stopped_at < undisturbed["step"]
    assert saved_steps() == [stopped_at]
    result = start(procs=after, resume="auto", workers=2 if before == 4 else 0, shard_optimizer=sharded == "after")
    assert result.world_size == after
    assert outcome(result) == undisturbed
    assert [event["step"] for event in events("resumed")] == [stopped_at]
    board = EventAccumulator("run/tensorboard").Reload()
    assert [(scalar.step, scalar.value) for scalar in board.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in undisturbed["losses"]
    ]
    assert [scalar.step for scalar in board.Scalars("accuracy")] == [row["step"] for row in undisturbed["history"]]


def test_saves_at_times_that_are_measured_do_not_change_the_weights(undisturbed: dict) -> None:
    def hurried() -> torch.nn.Module:
        """In the ranks: `auto` saves at once, then as often as its measured cost allows."""
        save_clock.FIRST_S = interval.SHORTEST_S = interval.LONGEST_S = 0.0
        interval.MOST_COST = 1.0
        return conv_net()

    result = start(procs=2, model_fn=hurried, checkpoint={"every_minutes": "auto"})
    assert min(event["step"] for event in events("checkpoint")) < result.step
    assert outcome(result) == undisturbed


def test_no_sample_is_read_to_be_thrown_away() -> None:
    class Counted(Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            with Path(self.path).open("ab") as file:
                file.write(b"x")
            return super().__getitem__(index)

    def counted() -> Images:
        data = Counted(ODD)
        data.path = str(path)
        return data

    stop_step(dataset_fn=stopping(2), model_fn=layer_net, procs=2)
    path = Path("counted").resolve()
    result = start(dataset_fn=counted, model_fn=layer_net, procs=1, resume="run")
    first = events("resumed")[0]["step"]
    per_step, per_epoch = 3 * 4, -(-ODD // 12)
    done = first // per_epoch * ODD + first % per_epoch * per_step
    assert path.stat().st_size == result.samples - done == 3 * ODD - done


def test_a_checkpoint_begins_a_new_run_and_leaves_the_old_one_alone(undisturbed: dict) -> None:
    first = start(checkpoint={"every_steps": 4, "keep": 10})
    assert outcome(first) == undisturbed
    before = sorted(path.name for path in Path("run/checkpoints").iterdir())
    step = saved_steps()[1]
    result = start(resume=f"run/checkpoints/step-{step:08d}", run_dir="other", procs=2)
    assert result.run_dir == Path("other").resolve()
    assert result.weights_sha256 == undisturbed["weights"]
    assert result.history == undisturbed["history"]
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == before
    assert min(event["step"] for event in events("step", "other")) > step


def test_a_teacher_and_a_loss_with_state_resume_on_other_numbers_of_ranks() -> None:
    stateful = {"model_fn": Teacher, "loss_fn": Scaled()}
    whole = start(**stateful, checkpoint={"every_steps": 4, "keep": 10})
    step = saved_steps()[1]
    resumed = start(**stateful, resume=f"run/checkpoints/step-{step:08d}", run_dir="other", procs=4)
    assert resumed.history == whole.history
    assert resumed.weights_sha256 == whole.weights_sha256


def test_a_finished_run_resumes_when_there_is_more_to_do() -> None:
    steady = {"schedule": {"name": "constant"}}
    whole = start(**steady, run_dir="whole")
    start(**steady, num_epochs=2)
    longer = start(**steady, num_epochs=3, resume="auto")
    assert outcome(longer) == outcome(whole)
    assert events("resumed")[0]["changes"] == ["num_epochs 2 → 3"]
    again = start(**steady, num_epochs=3, resume="auto")  # nothing is left to do
    assert outcome(again) == outcome(whole)


def test_a_run_that_max_steps_cut_short_resumes_in_the_middle_of_its_epoch() -> None:
    steady = {"schedule": {"name": "constant"}}
    whole = start(**steady, run_dir="whole", num_epochs=2)
    start(**steady, num_epochs=2, max_steps=10)
    longer = start(**steady, num_epochs=2, resume="auto", procs=2)
    assert longer.history == whole.history
    assert longer.weights_sha256 == whole.weights_sha256


class Odd(torch.nn.Module):
    """Parts of tables, numbers that share memory, unusual types and plain objects are its state."""

    def __init__(self) -> None:
        super().__init__()
        table, flat = torch.randn(3, 36), torch.randn(720)
        self.first, self.second = (torch.nn.Parameter(part.view(10, 36)) for part in (flat[:360], flat[360:]))
        self.register_buffer("row", table[1])
        self.register_buffer("twin", self.row)
        self.register_buffer("rows", table[1:])
        self.register_buffer("broad", torch.ones(1).expand(36))
        self.register_buffer("wide", torch.randn(4, dtype=torch.complex128))
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        pixels = images.flatten(1) * self.broad + self.row + self.twin
        return pixels @ (self.first + self.second).t() + self.wide.abs().sum().float()


def test_a_model_with_an_unusual_state_ends_and_resumes_as_any_other() -> None:
    whole = start(model_fn=Odd, run_dir="whole")
    stop_step(model_fn=Odd, dataset_fn=stopping(1), procs=2)
    result = start(model_fn=Odd, resume="auto", procs=1)
    assert outcome(result) == outcome(whole)
    model = result.load_model()
    assert torch.equal(model.second, whole.model.second)
    assert model.calls > 0


def test_a_ranking_by_loss_is_measured_once_and_goes_along() -> None:
    by_loss = {"curriculum": {"by": "loss", "start": 0.2, "epochs": 2}}
    whole = start(**by_loss, checkpoint={"every_steps": 1, "keep": 30, "async": False})
    per_epoch = -(-ODD // 12)
    # In the first epoch, at its end, and later, when the weights have changed and only the checkpoint knows the losses.
    for step in (per_epoch - 3, per_epoch, 2 * per_epoch + 2):
        result = start(**by_loss, resume=f"run/checkpoints/step-{step:08d}", run_dir=f"from-{step}", procs=2)
        assert result.weights_sha256 == whole.weights_sha256


def test_a_stop_while_samples_are_ranked_loses_nothing(undisturbed: dict) -> None:
    by_loss = {"curriculum": {"by": "loss", "start": 0.5, "epochs": 1}}
    visits = [3]  # after a trial and the first epoch: the ranking, which may be over before a launcher has passed it on
    asking = Disturbed(Path("fetched").resolve(), visits, send_self(signal.SIGTERM))
    stopped_at = stop_step(**by_loss, dataset_fn=lambda: asking, procs=2)
    assert stopped_at == -(-ODD // 12)
    assert [row["step"] for row in events("epoch")] == [stopped_at]
    result = start(**by_loss, resume="auto")
    assert result.weights_sha256 == start(**by_loss, run_dir="whole").weights_sha256
    assert result.weights_sha256 != undisturbed["weights"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_lanes_and_threads_stay_those_of_the_first_launch(is_damaged: bool) -> None:
    """Also where a machine that lost power has left empty files: the checkpoint holds them, too."""
    start(lanes=None, threads=None, procs=2, num_epochs=1)
    for name in ("config.yaml", "result.json") if is_damaged else ():
        Path("run", name).write_text("")
    result = start(lanes=None, threads=None, procs=1, resume="auto", num_epochs=2)
    assert (result.lanes, result.world_size) == (2, 1)
    with pytest.raises(ConfigError, match="lanes=4 but the run started with lanes=2"):
        start(lanes=4, procs=1, resume="auto")


def test_a_large_state_is_written_by_all_ranks_and_read_by_any_number() -> None:
    def wide() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4200), torch.nn.Linear(4200, 4200),
                                   torch.nn.Linear(4200, 4200), torch.nn.Linear(4200, 2))  # fmt: skip

    plain = {
        "model_fn": wide, "optimizer": {"name": "sgd", "lr": 0.01}, "ema": None, "lanes": 2, "precision": "fp32",
        "schedule": {"name": "constant"}, "val_dataset_fn": None, "val_fraction": 0,
    }  # fmt: skip
    whole = start(**plain, max_steps=3, procs=1, run_dir="whole")
    start(**plain, max_steps=2, procs=2)
    files = sorted(path.name for path in Path("run/checkpoints/step-00000002").iterdir())
    assert files == [
        "manifest.json", "optimizer.safetensors", "state.pt", "weights-00001-of-00002.safetensors",
        "weights-00002-of-00002.safetensors",
    ]  # fmt: skip
    assert start(**plain, max_steps=3, procs=1, resume="auto").weights_sha256 == whole.weights_sha256


# --- checkpoints that are damaged or do not fit --------------------------------------------------------------


def damage(step: int, name: str = "weights.safetensors") -> None:
    path = Path(f"run/checkpoints/step-{step:08d}/{name}")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_is_used(undisturbed: dict) -> None:
    stop_step(checkpoint={"every_steps": 2}, dataset_fn=stopping(2))
    [*_, before, newest] = saved_steps()
    damage(newest)
    result = start(resume="auto")
    assert outcome(result)["weights"] == undisturbed["weights"]
    assert outcome(result)["losses"] == undisturbed["losses"]
    [warning] = [event["text"] for event in events("warning")]
    assert f"step-{newest:08d} cannot be used: weights.safetensors has" in warning
    assert events("resumed")[0]["step"] == before
    assert Path(f"run/checkpoints/damaged-step-{newest:08d}").is_dir()


def test_a_run_without_a_valid_checkpoint_never_begins_again_by_itself() -> None:
    start(checkpoint={"every_steps": 4}, num_epochs=1)
    for step in saved_steps():
        damage(step, "state.pt")
    for _ in range(2):
        with pytest.raises(RankFailed, match=CheckpointsDamaged.__name__):
            start(resume="auto")
    assert json.loads(Path("run/result.json").read_text())["step"] == 7  # of the first run, untouched
    assert max(event["step"] for event in events("step")) == 7


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose events are ahead of its newest valid checkpoint, with leftovers of a killed save."""
    path = tmp_path_factory.mktemp("behind") / "run"
    start(num_epochs=1, checkpoint={"every_steps": 4}, run_dir=str(path))
    with (path / "checkpoints/step-00000007/state.pt").open("ab") as file:
        file.write(b"x")
    (path / "checkpoints/.step-00000009.partial").mkdir()
    return path


def listing() -> dict[str, tuple[int, str]]:
    """Every file and folder of the run, when it was changed and what it holds; not the logs of the last attempt."""
    found = {}
    for path in sorted(Path("run").rglob("*")):
        if path.is_relative_to("run/logs") or path.name == ".lock":
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = path.stat().st_mtime_ns, digest
    return found


def data_on_a_full_disk() -> Images:
    """Only for the rank that calls it: the disk of the tests has space."""
    shutil.disk_usage = lambda path: SimpleNamespace(free=1000)
    return Images(ODD, augment=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 8}, "lanes=8 but the run started with lanes=4"),
        ({"batch_size": 5, "procs": 2}, r"batch_size=5 but .*step-00000004 was saved with batch_size=3"),
        ({"seed": 5}, "seed=5 but .* was saved with seed=0"),
        ({"model_fn": layer_net, "procs": 2}, "does not fit the model"),
        ({"model_fn": lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))}, "does not fit"),
        ({"ema": None}, "ema=None but .* was saved with ema=0.8"),
        ({"optimizer": {"name": "sgd", "lr": 0.1}, "procs": 2}, "has an optimizer with .*betas"),
        ({"dataset_fn": data_on_a_full_disk, "procs": 2}, "run_dir=.* has 0 MB free, but two checkpoints need"),
    ],
)
def test_a_conflict_with_the_checkpoint_is_an_error_with_both_values_and_changes_nothing(
    behind: Path, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(behind, "run")
    before = listing()
    assert {"run/result.json", "run/events.jsonl", "run/checkpoints/.step-00000009.partial"} <= before.keys()
    assert any(name.startswith("run/tensorboard/") for name in before)
    with pytest.raises(ConfigError, match=message):
        start(**changes, resume="auto")
    assert listing() == before


def test_other_shapes_are_an_error_with_both_values() -> None:
    start(num_epochs=1, model_fn=layer_net, ema=None)

    def wider() -> torch.nn.Module:
        model = layer_net()
        model[1], model[4] = torch.nn.Linear(36, 20), torch.nn.Linear(20, 2)
        return model

    with pytest.raises(ConfigError, match=r"1.weight is \(16, 36\) as saved and \(20, 36\) in the model"):
        start(num_epochs=1, model_fn=wider, ema=None, resume="auto")


def test_auto_takes_the_newest_unfinished_run_of_that_name() -> None:
    shared = {"run_dir": None, "name": "mine", "model_fn": layer_net}
    finished = start(**shared, num_epochs=1)
    log, launcher = Path("fetched").resolve(), os.getpid()
    with pytest.raises(SystemExit):
        Trainer(**options(**shared, dataset_fn=lambda: Disturbed(log, [1], send(signal.SIGTERM, launcher)))).start()
    result = start(**shared, resume="auto")
    assert result.run_dir != finished.run_dir
    assert events("resumed", result.run_dir)
    assert start(**shared, resume="auto").run_dir not in (finished.run_dir, result.run_dir)
