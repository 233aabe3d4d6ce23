"""The fork server: what ranks inherit from it, when it is used again, and that it ends with its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

from paceline import Trainer


def about_this_rank(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> dict[str, Any]:
    return {
        "fork_server": os.getppid(), "name": psutil.Process().name(),
        "folder": str(Path.cwd()), "note": os.environ.get("NOTE"),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGCHLD)],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "policy": os.environ.get("OMP_WAIT_POLICY"), "group": os.getpgid(0) == os.getpid(),
    }  # fmt: skip


def tell(**options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"train_fn": about_this_rank, "batch_size": 1, "num_epochs": 1, **options}
    warning: dict[str, Any] = Trainer(lambda: nn.Linear(1, 1), lambda: list(range(40)), **given).start().value
    return warning


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_next_run_starts_from_the_same_fork_server_with_its_own_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = tell()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("NOTE", "new")
    second = tell()
    assert first["fork_server"] == second["fork_server"]
    assert (first["note"], second["note"]) == (None, "new")
    assert (first["folder"], second["folder"]) == (str(tmp_path), str(tmp_path / "elsewhere"))


def test_signals_reach_the_ranks_of_a_launcher_that_blocks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPY_NOTE", "blocked")  # needs a new fork server
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        assert tell()["blocked"] == set()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize(("name", "value"), [("MKL_CBWR", "COMPATIBLE"), ("TORCHINDUCTOR_MAX_AUTOTUNE", "1")])
def test_what_libraries_read_while_they_are_loaded_needs_a_new_fork_server(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tell()
    monkeypatch.setenv(name, value)
    second = tell()
    assert first["fork_server"] != second["fork_server"]
    assert not psutil.pid_exists(first["fork_server"])


def test_files_of_the_working_folder_are_not_taken_for_modules_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("profile", "statistics", "paceline"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is not the module that was meant')")
    monkeypatch.setenv("MKL_CBWR", "AUTO")  # so that a new fork server starts here
    assert tell()["folder"] == str(tmp_path)


def test_several_ranks_have_a_fork_server_of_their_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    alone, several = tell(), tell(procs=2)
    assert (alone["policy"], several["policy"]) == (None, "passive")
    assert alone["fork_server"] != several["fork_server"]


def test_one_rank_and_several_share_a_fork_server_where_the_user_has_set_how_threads_wait() -> None:
    alone, several = tell(), tell(procs=2)  # tests set OMP_WAIT_POLICY
    assert (alone["policy"], several["policy"]) == ("passive", "passive")
    assert alone["fork_server"] == several["fork_server"]


def test_a_fork_server_that_was_killed_between_runs_is_replaced() -> None:
    first = tell()
    fork_server = psutil.Process(first["fork_server"])
    fork_server.kill()
    while fork_server.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    second = tell()
    assert first["fork_server"] != second["fork_server"]


def test_a_rank_begins_as_a_process_of_its_own() -> None:
    warning = tell()
    assert warning["signals"] == [str(signal.SIG_DFL), str(signal.SIG_DFL)]
    assert warning["group"]
    assert warning["name"] == "paceline-rank-0"
    assert psutil.Process(warning["fork_server"]).name() == "paceline-forker"


def test_a_fork_server_that_still_imports_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        f"import threading; open({str(tmp_path / 'importing')!r}, 'w').close(); threading.Event().wait()"
    )
    code = "from paceline.launch import processes; processes.prepare(is_passive=False); print(flush=True); input()"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
    ) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        [fork_server] = psutil.Process(launcher.pid).children()
        while not (tmp_path / "importing").exists():
            time.sleep(0.01)
        launcher.kill()
    psutil.wait_procs([fork_server], timeout=30)
    is_left = fork_server.is_running() and fork_server.status() != psutil.STATUS_ZOMBIE
    if is_left:
        fork_server.kill()
    assert not is_left


def test_nothing_is_left_or_printed_when_the_script_ends(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os\nfrom torch import nn\nfrom paceline import Trainer\n"
        "def train(model, *rest): return os.getppid()\n"
        "trainer = Trainer(lambda: nn.Linear(1, 1), lambda: [0], train_fn=train, batch_size=1, num_epochs=1)\n"
        "print(trainer.start().value)\n"
    )
    ended = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=True)
    assert not psutil.pid_exists(int(ended.stdout.split()[-1]))
    assert "Warning" not in ended.stderr
