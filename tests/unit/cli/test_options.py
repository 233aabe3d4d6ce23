"""Keys of a config and names of other libraries that are typed as options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.options import translated
from paceline.config.answers import setting_of
from paceline.config.other_names import TABLE
from paceline.errors import ConfigError

OWN = {"procs": True, "nodes": True, "rendezvous": True, "run_dir": True, "resume": True, "json": False}
HOSTS = "--nodes=2 --rendezvous=n1:29400"

FUNCTIONS = """
def get_model(input_size=4, hidden=8): ...
def get_data(input_size=4, pretrained=False): ...
"""


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config `own.yaml` in the working folder, with functions that take arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    Path("options_of_own.py").write_text(FUNCTIONS)
    Path("own.yaml").write_text("model_fn: 'options_of_own:get_model'\ndataset_fn: 'options_of_own:get_data'\n")


@pytest.mark.parametrize(
    ("typed", "words", "lines"),
    [
        ("digits --epochs 5", "digits num_epochs=5", ["--epochs 5 means num_epochs=5"]),
        ("--batch-size=64 digits --backend gloo", "digits batch_size=64 backend=gloo", []),
        ("digits -lr 1e-3", "digits optimizer.lr=1e-3", ["-lr 1e-3 means optimizer.lr=1e-3"]),
        ("digits --optimizer.weight-decay 0.1", "digits optimizer.weight_decay=0.1", []),
        ("digits --seed 3 --device cpu lanes=2", "digits lanes=2 seed=3 device=cpu", []),
        ("digits --world_size 2", "--procs=2 digits", ["--world_size 2 means --procs 2"]),
        ("--gpus 2 digits", "--procs=2 digits", ["--gpus 2 means --procs 2, the number of processes on each host"]),
        ("digits --gpus 0", "digits device=cpu", ["--gpus 0 means device=cpu"]),
        ("--procs 2 digits --save_every 9", "--procs=2 digits checkpoint.every_steps=9", ...),
        ("digits --run_dir out", "digits --run-dir=out", []),
        ("--fp16 digits", "digits precision=fp16", ["--fp16 means precision=fp16"]),
        ("--fp16 true digits lanes=2", "digits lanes=2 precision=fp16", ["--fp16 true means precision=fp16"]),
        ("digits --resume_from auto --json", "--resume=auto digits --json", ["--resume_from auto means --resume auto"]),
        (
            "digits --gradient_accumulation_steps 4 --procs 2", "digits --procs=2 lanes=8",
            ["--gradient_accumulation_steps 4 means lanes=8, 4 for each of the 2 processes"],
        ),
        ("digits --nnodes 2 --rendezvous n1:29400", "--nodes=2 digits --rendezvous=n1:29400", ...),
        ("digits --lr {0.1,0.2}", "digits optimizer.lr={0.1,0.2}", ...),
        ("digits --epochs -1 -- --lr", "", []),
        ("nothing --epochs 5", "nothing num_epochs=5", ...),
        ("own.yaml --hidden 3", "own.yaml model_args.hidden=3", ["--hidden 3 means model_args.hidden=3"]),
        ("own.yaml --pretrained", "own.yaml dataset_args.pretrained=true", ...),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("own_config")
def test_options_with_one_meaning_are_accepted(
    typed: str, words: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if not words:
        with pytest.raises(ConfigError, match="num_epochs=1000 max_steps=…"):
            translated(shlex.split(typed), OWN)
        return
    assert translated(shlex.split(typed), OWN) == shlex.split(words)
    assert lines is ... or capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("digits --epochs", "--epochs has no value; write --epochs VALUE"),
        ("digits --lr batch_size=3", "--lr has no value; write --lr VALUE"),
        ("digits --fp16 false", "--fp16 false is called precision in Paceline; remove it"),
        (
            "digits --local_rank 0",
            "--local_rank 0 is not a key of Paceline; remove it, ranks are assigned automatically; ",
        ),
        ("digits --num_nodes 2", "--num_nodes 2 is called nodes in Paceline; write nodes=2 rendezvous=HOST:29400"),
        (
            f"digits {HOSTS} --world_size 4",
            "--world_size 4 is called procs in Paceline; write procs=4, if all are on one",
        ),
        (
            "digits --gradient_accumulation_steps 4",
            "lanes in Paceline; write lanes=4, times the number of processes, whose",
        ),
        (
            "digits --T_max 9",
            "--T_max 9 is called schedule.name in Paceline; write schedule.name=cosine, which ends with",
        ),
        ("digits --adam_beta1 0.8", "optimizer.betas in Paceline; write 'optimizer.betas=[0.8, 0.999]'"),
        ("digits --monitor val_loss", "write early_stop.metric=val_loss"),
        ("digits --epochs 3 --max_epochs 4", "--epochs 3 and --max_epochs 4 both set num_epochs; keep one of them"),
        ("digits --prcs 2", "--prcs is not an option; did you mean --procs?"),
        ("digits --num_epoch 2", "--num_epoch is not an option; did you mean --num_epochs?"),
        ("digits --learning_rat 2", "--learning_rat is not an option; did you mean --learning_rate?"),
        ("digits --foo", "--foo is not an option; model_fn accepts channels, dropout; dataset_fn accepts no arguments"),
        ("--foo", "--foo is not an option; use --help to list the options; docs/configuration.md lists the keys"),
        (
            "own.yaml --input_size 10",
            "--input_size 10 is an argument of model_fn and of dataset_fn; write model_args.input_size=10 "
            "dataset_args.input_size=10, or one of them",
        ),
        ("own.yaml --inputsize 10", "--inputsize is not an option; did you mean --input_size?"),
        ("own.yaml --foo 3", "model_fn accepts input_size, hidden; dataset_fn accepts input_size, pretrained"),
    ],
)
@pytest.mark.usefixtures("own_config")
def test_other_options_are_answered_with_the_words_to_type(typed: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        translated(shlex.split(typed), OWN)


@pytest.mark.usefixtures("own_config")
def test_hosts_need_no_rendezvous_if_the_dotenv_file_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    Path(".env").write_text("MASTER_ADDR=n1\nMASTER_PORT=29500\n")
    assert translated(["own.yaml", "--nnodes", "2"], OWN) == ["--nodes=2", "own.yaml"]


def test_gpus_of_a_job_are_not_guessed() -> None:
    with pytest.raises(ConfigError, match="--gpus 2 has two meanings here; write --gpus-per-node 2 or --procs 2"):
        cli.app(["submit", "digits", "--gpus", "2", "--dry-run"], standalone_mode=False)


@pytest.mark.parametrize("command", ["train", "submit", "compare", "tune", "profile", "plan", "doctor"])
def test_every_command_with_keys_takes_them_as_options(command: str) -> None:
    with pytest.raises(ConfigError, match=r"^--epochs has no value; write --epochs VALUE$"):
        cli.app([command, "digits", "--epochs"], standalone_mode=False)


def test_no_condition_or_open_value_is_accepted() -> None:
    """Over the whole table: what is accepted is one complete setting."""
    accepted = {
        name: setting_of(name, 2, {}) for rows in TABLE.values() for row in rows for name in row.names
    }  # fmt: skip
    assert accepted["epochs"] == ("num_epochs", 2, "")
    assert accepted["lr"] == ("optimizer.lr", 2, "")
    for setting in filter(None, accepted.values()):
        assert "…" not in str(setting[1])
        assert "HOST" not in str(setting[1])
        assert not setting[2].startswith("if ")
    assert [name for name in ("fp16", "wandb_project", "T_max", "nnodes", "master_port") if accepted[name]] == []


@pytest.mark.parametrize(("option", "example"), [("--resume", "auto"), ("--procs", "2")])
def test_an_option_without_a_value_is_answered_with_one(option: str, example: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.app(["train", "digits", option], standalone_mode=False)
    assert str(caught.value) == f"{option} has no value; write, for example, {option} {example}"


def test_a_command_without_keys_reports_an_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(["watch", "--lr"])
    assert caught.value.code == 2
    assert "No such option: --lr" in capsys.readouterr().err
