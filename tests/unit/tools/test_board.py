"""The errors of `paceline board`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.tools.board import serve


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^runs is not a folder; give run folders, such as runs/NAME/DATE-TIME$"):
        serve([Path("runs")], None, print)


def test_a_missing_tensorboard_is_named_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"^paceline board needs TensorBoard .*; pip install tensorboard$"):
        serve([tmp_path], None, print)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^TensorBoard cannot start: .*{port}.*; choose another --port"):
            serve([tmp_path], port, print)


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_several_runs_cannot_have_names_with_the_separators_of_tensorboard(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="contains a comma or a colon; show this run alone"):
        serve([tmp_path, tmp_path / name], None, print)
