"""`paceline checkpoints`, `--resume`, and exit codes, as a job script sees them."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from paceline.checkpoint.store import Store
from paceline.cli.trained import checkpoints
from paceline.observe.events import Events
from paceline.run import checked_files
from paceline.run.layout import RunFolder
from support.runs import events_of

SCRIPT = """
import os, signal, sys
import torch
from paceline import Trainer

class Data(torch.utils.data.Dataset):
    def __init__(self): self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 9 and "HIT" in os.environ and not os.path.exists("hit"):
            open("hit", "w").close()
            os.kill(os.getpid(), getattr(signal, os.environ["HIT"]))
        return self.x[i], (self.x[i].sum() > 0).long()

result = Trainer(lambda: torch.nn.Linear(4, 2), Data, loss_fn=torch.nn.functional.cross_entropy, metrics=["accuracy"],
                 batch_size=4, lanes=2, num_epochs=4, procs=2, run_dir=sys.argv[1], resume="auto",
                 checkpoint={"every_steps": 3, "keep": 2, "best": {"metric": "accuracy", "mode": "max"}}).start()
os.write(1, f"done {result.weights_sha256}{chr(10)}".encode())  # at once: both ranks write to one pipe
"""


@pytest.fixture(scope="module")
def whole(run_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, with the output of its script in `output.txt`."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "main.py").write_text(SCRIPT)
    ended = run_in(folder, "python", "main.py", "run")
    assert ended.returncode == 0, ended.stderr
    (folder / "run" / "output.txt").write_text(ended.stdout)
    return folder / "run"


def test_a_stopped_script_ends_with_exit_code_3_and_resumes_when_started_again(
    run, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    stopped = run("python", "main.py", "job", HIT="SIGTERM")
    assert stopped.returncode == 3, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not (tmp_path / "job" / "result.json").exists()
    again = run("python", "main.py", "job", HIT="SIGTERM")
    assert again.returncode == 0, again.stderr
    assert "resuming from step" in again.stderr
    assert again.stdout == (whole / "output.txt").read_text()


def test_ranks_that_torchrun_restarts_resume_from_their_checkpoint(run, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SCRIPT.replace('resume="auto",', ""))
    launch = ["torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "main.py"]
    killed = run(*launch, "job", HIT="SIGKILL")
    assert killed.returncode == 0, killed.stderr
    assert len(events_of(tmp_path / "job", "run_started")) == 2
    assert (whole / "output.txt").read_text() in killed.stdout


def test_under_torchrun_one_signal_stops_all_ranks_and_the_next_launch_resumes(
    run, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    launch = ["torchrun", "--standalone", "--nproc_per_node=2", "main.py", "job"]
    stopped = run(*launch, HIT="SIGUSR1")
    assert stopped.returncode != 0
    assert json.loads((tmp_path / "job" / "logs" / "stopped.json").read_text())["is_saved"]
    assert "exitcode  : 3" in stopped.stderr
    again = run(*launch, HIT="SIGUSR1")
    assert again.returncode == 0, again.stderr
    assert (whole / "output.txt").read_text() in again.stdout


def test_checkpoints_are_listed_with_what_is_known_of_them(run, run_here, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    listed = run("paceline", "checkpoints", "run")
    assert listed.returncode == 0
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert rows[0] == ["checkpoint", "size", "saved", "metrics", "state"]
    assert rows[1][0] == "step-00000032"
    assert all(row[-1] == "valid" for row in rows[1:])
    assert "accuracy" in rows[1]
    history = json.loads((tmp_path / "run" / "result.json").read_text())["history"]
    best = f"{max(row['accuracy'] for row in history):.4f}"
    assert best in [row[row.index("accuracy") + 1] for row in rows[1:] if "accuracy" in row]

    weights = tmp_path / "run" / "checkpoints" / "step-00000032" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    damaged = run_here("paceline", "checkpoints", "run").stdout
    assert "cannot be used: weights.safetensors has a wrong checksum" in damaged

    wrong = run_here("paceline", "checkpoints", "nowhere")
    assert wrong.returncode == 2
    assert "nowhere is not a run folder" in wrong.stderr


def test_a_checkpoint_saved_at_a_stop_shows_what_was_measured_later_or_that_nothing_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text("name: run\n")
    store = Store(folder.checkpoints)
    for step in (10, 15):
        store.partial(step).mkdir(parents=True)
        store.publish(step, [checked_files.write(store.partial(step) / "state.pt", [bytes(2_900)])], {}, {})
    with closing(Events(folder.events)) as events:  # stopped after an epoch's last step, evaluated by the next attempt
        events.write("epoch", epoch=1, step=10, train_loss=0.5, val_loss=0.25)
    checkpoints(tmp_path)
    of_15, of_10 = capsys.readouterr().out.splitlines()[1:]
    assert "not evaluated at this step" in of_15
    assert "train_loss 0.5000  val_loss 0.2500" in of_10
    assert "2.9 kB" in of_10
