"""How an uncaught error of Paceline is shown and ends a script, and where functions of the user are."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from paceline.errors import ConfigError, RankFailed
from paceline.user_code import place_of, render, with_place

SCRIPT = "import sys\nfrom paceline.errors import *\n\ndef go():\n    raise {error}\n\n{before}\ngo()\n"


def run_script(folder: Path, error: str, *options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    path = folder / "main.py"
    path.write_text(SCRIPT.format(error=error, before=before))
    return subprocess.run([sys.executable, *options, str(path)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("error", "code"), [('ConfigError(["lr=x", "seed=y"])', 2), ('RankFailed("rank 1")', 1)])
def test_a_script_ends_with_the_code_of_the_error(error: str, code: int, tmp_path: Path) -> None:
    ended = run_script(tmp_path, error)
    assert ended.returncode == code
    assert ended.stderr.startswith("Traceback (most recent call last):\n")
    assert ended.stderr.endswith("\nConfigError: lr=x\nseed=y\n" if code == 2 else "\nRankFailed: rank 1\n")


def test_frames_of_paceline_and_the_cause_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "main.py"
    path.write_text("from paceline.config import build\n\nbuild({'lr': 3})\n")
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[:3] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 3, in <module>',
        "    build({'lr': 3})",
    ]
    assert ended.stderr.count("File ") == 1


def test_other_errors_other_hooks_and_interactive_shells_are_left_alone(tmp_path: Path) -> None:
    assert run_script(tmp_path, "KeyError(3)").returncode == 1
    caught = run_script(tmp_path, 'ConfigError("x")', before="sys.excepthook = lambda *error: print('mine')")
    assert (caught.returncode, caught.stdout) == (1, "mine\n")  # a hook that is set later replaces ours
    earlier = "import sys; sys.excepthook = lambda *error: print('mine'); import runpy; runpy.run_path('main.py')"
    done = subprocess.run([sys.executable, "-c", earlier], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "mine\n"
    shell = subprocess.run(
        [sys.executable, "-i", "-c", "from paceline.errors import ConfigError"], capture_output=True, text=True,
        input="raise ConfigError('wrong')\nprint('still here')\n", check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "still here" in shell.stdout
    assert "ConfigError: wrong" in shell.stderr


def test_an_error_that_is_caught_is_as_ever() -> None:
    with pytest.raises(ConfigError) as caught:
        raise ConfigError(["a", "b"])
    assert caught.value.problems == ["a", "b"]
    lines = caught.value._render_traceback_()
    assert lines == render(caught.value)
    assert lines[0] == "Traceback (most recent call last):"
    assert f'  File "{__file__}", line' in lines[1]
    assert lines[-2:] == ["ConfigError: a", "b"]


def test_an_error_that_was_not_raised_has_no_traceback() -> None:
    assert render(RankFailed("rank 1 failed")) == ["RankFailed: rank 1 failed"]


class Plain: ...


class Model(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def function(x: int = 3) -> None: ...


def line_of(value: Any) -> str:
    return f"{__file__}:{inspect.getsourcelines(value)[1]}"


def test_the_place_of_a_function_is_where_it_is_defined() -> None:
    assert place_of(function) == line_of(function)
    assert place_of(functools.partial(function, 4)) == line_of(function)
    assert place_of(Model()) == place_of(Model) == line_of(Model.forward)
    assert with_place("loss_fn", function) == f"loss_fn ({line_of(function)})"


@pytest.mark.parametrize(
    "value", [nn.CrossEntropyLoss(), nn.functional.mse_loss, nn.Linear, len, dict, "model", None, Plain]
)
def test_what_libraries_define_has_no_place(value: Any) -> None:
    assert place_of(value) is None
    assert with_place("loss_fn", value) == "loss_fn"


def test_packages_installed_outside_of_this_python_are_libraries_too() -> None:
    for folder in ("/opt/env/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages"):
        names: dict[str, Any] = {}
        exec(compile("def read():\n    pass\n", f"{folder}/table/read.py", "exec"), names)
        assert place_of(names["read"]) is None
