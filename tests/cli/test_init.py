"""`paceline init` and the project folder that it writes: it runs as it is, every way there is to start it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.project import MANAGED, OWN_LOOP, init

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def project(run, tmp_path: Path) -> Path:
    ended = run("paceline", "init", "mylab")
    assert ended.returncode == 0, ended.stderr
    return tmp_path / "mylab"


def test_the_project_runs_as_a_script_without_a_main_guard(project: Path, run) -> None:
    assert {path.name for path in project.glob("*.*")} >= {
        "model_fn.py",
        "dataset_fn.py",
        "train.py",
        "main.py",
        "config.yaml",
    }
    assert "__name__" not in (project / "main.py").read_text()
    ended = run("python", "mylab/main.py")
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split("accuracy: ")[1].split()[0]) > 0.85
    assert list(project.parent.glob("runs/mylab/*"))  # as from its config


def test_the_project_runs_from_its_config(project: Path, run) -> None:
    ended = run("paceline", "train", "mylab/config.yaml", "num_epochs=2")
    assert ended.returncode == 0, ended.stderr
    [events] = project.parent.glob("runs/mylab/*/events.jsonl")
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    assert [row["accuracy"] for row in rows if row["event"] == "epoch"][-1] > 0.4
    assert any(row["event"] == "step" and row["loss"] for row in rows)


def train_project(run, *words: str) -> str:
    """The output of a training that must end well."""
    ended = run("paceline", "train", "mylab/config.yaml", "num_epochs=3", *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.usefixtures("project")
def test_the_project_gives_the_same_weights_on_1_and_2_processes(run) -> None:
    one, two = (train_project(run, "--procs", procs) for procs in ("1", "2"))
    assert hash_of(one) == hash_of(two)
    assert re.findall("done: .*", one) == re.findall("done: .*", two)  # with the accuracy


def test_the_project_resumes_after_a_request_to_stop_on_another_number_of_processes(project: Path, run) -> None:
    undisturbed = train_project(run)
    train = project / "train.py"
    hit = "run.log(loss=loss)\n            run.step_number == 30 and run.is_main and os.kill(os.getpid(), 15)"
    train.write_text("import os\n" + train.read_text().replace("run.log(loss=loss)", hit))
    stopped = run("paceline", "train", "mylab/config.yaml", "num_epochs=3")
    assert stopped.returncode == 3, stopped.stderr
    assert "stopped by SIGTERM" in stopped.stderr
    resumed = train_project(run, "--resume", "auto", "--procs", "1")
    assert hash_of(resumed) == hash_of(undisturbed)


def test_the_same_script_runs_under_torchrun(project: Path, run) -> None:
    ended = run("torchrun", "--nproc_per_node=2", "mylab/main.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("accuracy: ") == 2  # the script's own last line, once on each rank
    assert len(list(project.parent.glob("runs/*/*"))) == 1


@pytest.mark.parametrize(
    ("folder", "name", "line"),
    [("x", "x", "name: x"), ("my lab (2)", "my-lab-2-", "name: my-lab-2-"), ("2024", "2024", "name: '2024'")],
)
def test_the_run_is_named_after_the_folder(tmp_path: Path, folder: str, name: str, line: str) -> None:
    init(tmp_path / folder)
    assert line in (tmp_path / folder / "config.yaml").read_text().splitlines()
    assert f'    name="{name}",' in (tmp_path / folder / "main.py").read_text().splitlines()


@pytest.mark.parametrize("templates", [OWN_LOOP, MANAGED])
def test_the_project_imports_nothing_that_an_installation_lacks(templates: list[Path]) -> None:
    """The files of the template import only Python's modules, the project itself and required dependencies."""
    dependencies = PYPROJECT.read_text().partition("\ndependencies = [")[2].partition("]")[0]
    required = set(re.findall(r'"([\w-]+)', dependencies))
    sources = {path.stem: path.read_text() for template in templates for path in template.glob("*.py")}
    imported = {name for text in sources.values() for name in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)}
    assert "torch" in imported
    assert imported - sys.stdlib_module_names - sources.keys() - {"paceline"} <= required


def hash_of(output: str) -> str:
    return re.findall(r"weights (\w+)", output)[-1]


def test_the_managed_project_gives_the_same_weights_on_1_and_2_processes(run, tmp_path: Path) -> None:
    assert run("paceline", "init", "mine", "--managed").returncode == 0
    assert not (tmp_path / "mine" / "train.py").exists()
    ended = [run("paceline", "train", "mine/config.yaml", "num_epochs=3", "--procs", procs) for procs in ("1", "2")]
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
    assert hash_of(ended[0].stdout) == hash_of(ended[1].stdout)


def test_the_managed_project_runs_as_a_script(run, tmp_path: Path) -> None:
    assert run("paceline", "init", "mine", "--managed").returncode == 0
    ended = run("python", "mine/main.py")
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split("accuracy: ")[1].split()[0]) > 0.85


def test_a_recipe_has_its_own_loop(run) -> None:
    ended = run("paceline", "init", "mine", "--managed", "--recipe", "digits")
    assert ended.returncode == 2
    assert "--managed and --recipe digits are both given; keep one of them" in ended.stderr


@pytest.mark.usefixtures("project")
def test_options_of_the_script_are_answered_with_the_command_that_takes_them(run) -> None:
    ended = run("python", "mylab/main.py", "--epochs", "5")
    command = "paceline train config.yaml --epochs 5"
    assert (ended.returncode, ended.stderr) == (1, f"main.py has no options; change its keywords, or run: {command}\n")


def test_a_folder_in_use_is_not_written_over(project: Path, run) -> None:
    (project / "main.py").write_text("mine\n")
    ended = run("paceline", "init", "mylab")
    assert ended.returncode == 2
    assert "exists and is not an empty folder" in ended.stderr
    assert (project / "main.py").read_text() == "mine\n"


def test_ranks_started_by_hand_join_at_the_address_in_the_dotenv_file(project: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (project / ".env").write_text(f"MASTER_ADDR=127.0.0.1\nMASTER_PORT={port}\n")
    command = [sys.executable, "-m", "paceline", "train", "mylab/config.yaml", "num_epochs=1"]
    import os

    ranks = [
        subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "done: step" in outputs[0][0]
    assert "done: step" not in outputs[1][0]


def test_a_recipe_is_copied_to_a_new_folder(run, tmp_path: Path) -> None:
    assert run("paceline", "init", "mine", "--recipe", "cifar10-fast").returncode == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "config.yaml", "config.schema.json", "cifar10.py", "cifar10_fast.py", "halve.py",
    }  # fmt: skip
    assert "name: cifar10-fast" in (tmp_path / "mine" / "config.yaml").read_text()
    ended = run("paceline", "init", "other", "--recipe", "digit")
    assert ended.returncode == 2
    assert "--recipe digit is unknown; did you mean digits?" in ended.stderr


def test_the_copy_of_a_recipe_trains_with_its_own_functions(run, tmp_path: Path) -> None:
    assert run("paceline", "init", "mine", "--recipe", "digits").returncode == 0
    module = tmp_path / "mine" / "digits.py"
    module.write_text(module.read_text() + "\nprint('this is my copy')\n")
    ended = run("paceline", "train", "mine/config.yaml", "max_steps=3")
    assert ended.returncode == 0, ended.stderr
    assert "this is my copy" in ended.stdout
