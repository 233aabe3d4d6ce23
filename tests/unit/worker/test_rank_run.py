"""What a run can do in any loop, on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from paceline.observe.events import Events
from paceline.worker.rank_run import RankRun
from support.disks import file_size_limit
from support.worlds import world_of


def run_in(folder: Path, events: Events) -> RankRun:
    return RankRun(
        rank=0, world_size=1, device=torch.device("cpu"), folder=folder, model=torch.nn.Identity(), total_steps=None,
        world=world_of(), events=events,
    )  # fmt: skip


def test_images_that_a_full_disk_does_not_take_are_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run = run_in(tmp_path, Events(path))
    noise = torch.rand(3, 50, 50)  # compresses to about 7 kB
    with file_size_limit(2000):
        for run.step_number in (1, 2):
            run.log(noise=noise)
    run.log(noise=noise)
    run.events.close()
    events: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("warning", 1), ("image", 2)]
    assert events[0]["text"].startswith("an image of step 1 could not be written: [Errno 27]")
