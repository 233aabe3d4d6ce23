"""`paceline board`: the real TensorBoard, as a browser sees it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.events import Events
from paceline.observe.sinks.sink import SinkFeeder
from paceline.observe.sinks.tensorboard import TensorBoardSink

PACELINE = Path(sys.executable).with_name("paceline")
TABLE = {"allowedStatuses": ["STATUS_SUCCESS"], "colParams": [], "startIndex": 0, "sliceSize": 10}


def write_run(folder: Path, lr: float) -> None:
    folder.mkdir(parents=True)
    events = Events(folder / "events.jsonl")
    events.write("run_started")
    events.write("step", step=1, epoch=1, loss=lr, grad_norm=0.5, step_ms=[1.0, 2.0], memory_mb=[3.0, 4.0])
    events.write("epoch", step=1, epoch=1, accuracy=0.75)
    events.write("run_finished", step=1, config={"optimizer": {"lr": lr}})
    events.close()
    board = SinkFeeder(folder / "events.jsonl", TensorBoardSink(folder))
    board.deliver()
    board.sink.close()


def fetch(address: str, body: dict[str, Any] | None = None) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with direct.open(request, timeout=30) as answer:
        return str(answer.read().decode())


def check_page(line: str, home: Path) -> None:
    address = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert address is not None, line
    assert "<title>TensorBoard</title>" in fetch(address[0])
    names = {"lr-0.5/tensorboard", f"{home}/lr-0.25/tensorboard".strip("/")}
    tags: dict[str, Any] = {}
    while tags.keys() != names:  # it reads the files after it has started to listen
        tags = json.loads(fetch(f"{address[0]}data/plugin/scalars/tags"))
    wanted = {"loss", "accuracy", "grad_norm", "step_ms/rank-1", "memory_mb/rank-0"}
    assert all(wanted <= of_run.keys() for of_run in tags.values())
    groups = json.loads(fetch(f"{address[0]}data/plugin/hparams/session_groups", TABLE))["sessionGroups"]
    assert sorted(group["hparams"]["optimizer.lr"] for group in groups) == [0.25, 0.5]
    metrics = {value["name"]["tag"]: value["value"] for value in groups[0]["metricValues"]}
    assert metrics["accuracy"] == 0.75


@pytest.mark.timeout(120)
def test_board_shows_runs_with_their_numbers_and_hyperparameters_until_ctrl_c(tmp_path: Path) -> None:
    for lr in (0.5, 0.25):
        write_run(tmp_path / f"lr-{lr}", lr)
    command = [str(PACELINE), "board", "lr-0.5", str(tmp_path / "lr-0.25"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            check_page(server.stdout.readline(), tmp_path)
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert server.stderr.read() == ""
