"""Damages the files of a run folder at random, and lets every command that reads them look at it.

    PYTHONPATH=tests python -m unit.fuzz --rounds 2000 --seed 1

A command may print less, or end with one sentence (a PacelineError). Any other exception is a finding.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import random
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import nn

import paceline
from paceline.checkpoint.state import capture
from paceline.checkpoint.store import MANIFEST, content_sha256
from paceline.cli import slurm, trained, views
from paceline.config import build
from paceline.errors import ConfigError, PacelineError
from paceline.observe.event_types import complete
from paceline.observe.events import read
from paceline.observe.screen import follower
from paceline.observe.screen.live import LiveState, after, view
from paceline.run.layout import RunFolder
from paceline.tools import compare
from paceline.worker.result import write_result
from support.runs import create_run, save_checkpoint

DOCS = Path(__file__).parents[2] / "docs" / "events.md"
LAB = (
    "import torch\ndef get_model(): return torch.nn.Linear(2, 2)\ndef get_dataset(): return [(torch.zeros(2), 0)] * 4\n"
)
NESTED: Any = []
for _ in range(150):
    NESTED = [NESTED]
ODD: list[Any] = [
    None, True, 0, -1, 3, 2**70, -(10**400), 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "x", "\x1b[31m", "\0",
    "\ud800", "2026-99-99", "a:b", [], {}, [None], ["a", 1], {"a": 1}, {"": None}, [[1.0], [2.0, 3.0]], NESTED,
]  # fmt: skip
Change = Callable[[random.Random, bytes], bytes]


# --- a run folder with everything in it -----------------------------------------------------------------------------


def make_run(top: Path, name: str) -> RunFolder:
    """The folder of a run with all kinds of events, a result and two checkpoints; nothing is trained."""
    (top / "pl_fuzz_lab.py").write_text(LAB)
    keys = {"model_fn": "pl_fuzz_lab:get_model", "dataset_fn": "pl_fuzz_lab:get_dataset", "loss_fn": "cross_entropy"}
    best = {"best": {"metric": "val_loss", "mode": "min"}}
    config = build({**keys, "metrics": ["accuracy"], "run_dir": top / name, "checkpoint": best}, folder=top)
    folder, model = create_run(config), nn.Linear(2, 2)
    folder.events.write_text("\n".join(examples()) + "\n")
    state = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), None, {})
    identity = {"config": {"seed": 0, "batch_size": 4}, "lanes": 2, "samples": 4, "threads": 1, "device": "cpu"}
    for step in (3, 6):
        save_checkpoint(folder, step, state, identity, {"val_loss": 0.5 / step, "accuracy": 0.5})
    row = {"epoch": 0, "step": 6, "train_loss": 0.5, "val_loss": 0.25, "accuracy": 0.5}
    write_result(
        folder, model, None, None, optimizer_sha256=None, metrics={"val_loss": 0.25, "accuracy": 0.5}, history=[row],
        step=6, epoch=1, world_size=2, lanes=2, seconds=1.5, samples=24,
    )  # fmt: skip
    return folder


def examples() -> list[str]:
    """The examples of docs/events.md, in an order in which a run may write them."""
    return re.findall(r"^```json\n(.+)\n```$", DOCS.read_text(), flags=re.MULTILINE)


# --- damage -----------------------------------------------------------------------------------------------------------


def damage_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, cut, insert or repeat some bytes."""
    place = rng.randrange(len(content) + 1)
    return rng.choice(
        [
            content[:place],
            content[:place] + bytes(rng.randrange(256) for _ in range(rng.randint(1, 4))) + content[place + 1 :],
            content[:place] + b"\xff\x00\xfe" + content[place:],
            content[place:] + content[:place],
            content[:place] + b"[" * 5000 + content[place:],
            b"",
        ]
    )


def damage_tree(rng: random.Random, tree: Any) -> Any:
    """Replace, remove, rename or add something at a random place of what JSON or YAML holds."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    for _ in range(rng.choice([1, 1, 2, 5])):
        box, key = rng.choice(places)
        action = rng.choice(["replace", "replace", "remove", "rename", "add"])
        if isinstance(box, list):
            box.insert(rng.randrange(len(box) + 1), copy.deepcopy(rng.choice(ODD)))
        elif action == "remove":
            box.pop(key, None)
        elif action == "rename":
            box[f"{key}x"] = box.pop(key, None)
        else:
            box[key if action == "replace" else "added"] = copy.deepcopy(rng.choice(ODD))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, (dict, list)):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield tree, key
            yield from _places(inner)


def damage_events(rng: random.Random, content: bytes) -> bytes:
    """Damage some lines by their fields."""
    lines = content.splitlines()
    for _ in range(rng.choice([1, 2, 8])):
        number = rng.randrange(len(lines))
        try:
            lines[number] = json.dumps(damage_tree(rng, json.loads(lines[number]))).encode()
        except (ValueError, IndexError):  # one that was damaged before, and has nothing left
            continue
    if rng.random() < 0.2:
        rng.shuffle(lines)
    return b"\n".join(lines) + b"\n"


def damage_json(rng: random.Random, content: bytes) -> bytes:
    return json.dumps(damage_tree(rng, json.loads(content))).encode()


def damage_manifest(rng: random.Random, content: bytes) -> bytes:
    """Wrong fields under a checksum that is right."""
    tree = json.loads(content)
    tree.pop("sha256")
    tree = damage_tree(rng, tree)
    return json.dumps({**tree, "sha256": content_sha256(tree)}).encode()


def damage_yaml(rng: random.Random, content: bytes) -> bytes:
    tree = damage_tree(rng, yaml.safe_load(content))
    return json.dumps(tree).encode() if rng.random() < 0.3 else yaml.safe_dump(tree).encode(errors="replace")


TARGETS: dict[str, Change] = {
    "events.jsonl": damage_events,
    "result.json": damage_json,
    "config.yaml": damage_yaml,
    f"checkpoints/step-00000006/{MANIFEST}": damage_manifest,
}


# --- readers ----------------------------------------------------------------------------------------------------------


def commands(folder: RunFolder, sound: RunFolder) -> dict[str, Callable[[], Any]]:
    """Everything that reads a run folder without training."""
    path = folder.path
    return {
        "report": lambda: views.report([path, sound.path], path.parent / "report.html"),
        "status": lambda: slurm.status(path),
        "watch": lambda: slurm.watch(path),
        "checkpoints": lambda: trained.checkpoints(path),
        "load": lambda: [paceline.load(path, which, trust=True) for which in (None, "best", 3)],
        "load without trust": lambda: paceline.load(path),
        "compare": lambda: (compare.losses_in(folder.path), compare.digests_in(folder.path)),
        "live view": lambda: draw(folder),
    }


def draw(folder: RunFolder) -> None:
    """What a terminal shows after each event."""
    state, console = LiveState(), Console(file=io.StringIO(), width=80)
    for event in read(folder.events):
        state = after(state, complete(event))
        console.print(view(state, 1.0, 80))


def findings(rounds: int, seed: int, top: Path) -> Iterator[str]:
    """What broke in so many rounds for each file: the file, the command and the traceback."""
    follower.INTERVAL_S, follower.INCOMPLETE_S, follower.IDLE_S, follower.RESUMED_S = 0.001, 0.0, 0.0, 0.0
    folder, sound = make_run(top, "run"), make_run(top, "sound")
    raised: list[str] = []
    threading.excepthook = lambda args: raised.append("".join(traceback.format_exception(args.exc_value)))
    for name, change in TARGETS.items():
        whole = (folder.path / name).read_bytes()
        for number in range(rounds):
            rng = random.Random(f"{seed} {name} {number}")
            damaged = (damage_bytes if rng.random() < 0.25 else change)(rng, whole)
            (folder.path / name).write_bytes(damaged)
            for command, call in commands(folder, sound).items():
                raised.clear()
                if trouble := _trouble(call) or "".join(raised):
                    yield f"{name}, round {number} of seed {seed}, {command}:\n{damaged[:2000]!r}\n{trouble}"
        (folder.path / name).write_bytes(whole)


def _trouble(call: Callable[[], Any]) -> str:
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
            call()
    except ConfigError as error:
        many = [problem for problem in error.problems if "\n" in problem and "executes the code below" not in problem]
        return f"more than a sentence: {many}" if many else ""
    except PacelineError:
        return ""
    except Exception:  # noqa: BLE001 - this is what is looked for
        return traceback.format_exc()
    return ""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=500, help="for each file")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as top:
        found = 0
        for finding in findings(given.rounds, given.seed, Path(top)):
            found += 1
            print(finding, flush=True)
    print(f"{found} findings in {given.rounds} rounds for each of {len(TARGETS)} files")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
