"""Throughput and memory of large models on one GPU: Paceline with its defaults, loops written by hand, Lightning.

    python benchmarks/large_models.py                                   # data on the GPU, then fed by a DataLoader
    python benchmarks/large_models.py --models gpt2 --feeds memory --json gpt2.json
    python benchmarks/large_models.py --only eager,paceline-compile     # Paceline with keys, see large_loops.py
    python benchmarks/large_models.py --tiny                            # tiny models, also on a CPU

Paceline gets a model, data, a loss and a batch size, nothing else; the other loops have its AdamW (fused, learning rate 0.001)
and its precision (bf16 autocast, fp32 on a CPU). GPT-2 is transformers' model as it is, with its mask, its dropout and
its vocabulary of 50,257, on 32 × 1,024 tokens; ResNet-50 and ViT-B/16 take 256 images of 224 × 224 pixels, channels-last.

Feeds: `memory` is a TensorDataset, which is on the GPU in all loops (by default also in Paceline's). `loader` is a DataLoader with
8 workers in all loops: they decode JPEG files, or read tokens from a memory map.

Each contender runs in its own process. The first steps, with all compilation and recording, are not counted. Paceline
is run three times; the row has the median, and below it is the hash, which is the same in all three (or DIFFERENT).
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from large_loops import CONTENDERS, DEFAULT, Contender, Setting
from large_workloads import WORKLOADS

from paceline.system.processes import die_with_parent

LIMIT_S = 600.0  # for one contender
WARM_UP = 20  # steps that are not counted; Paceline records a step after the eleventh
COLUMNS = "{:<62} {:>12} {:>9} {:>6} {:>10} {:>9}"


# --- one contender in one process ------------------------------------------------------------------------------------


def be_worker(job: dict[str, Any]) -> None:
    """Measure, and write the figures to a file."""
    die_with_parent(job.pop("parent"))
    contender, model, is_tiny, batch = (job.pop(key) for key in ("contender", "model", "tiny", "batch"))
    try:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        setting = Setting(work=WORKLOADS[model](is_tiny, batch), device=device, folder=Path.cwd(), **job)
        outcome = CONTENDERS[contender].loop(setting)
    except BaseException as error:  # noqa: BLE001 - any error of a contender is reported
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    Path("outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a library may still wait


def run(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """The figures of one contender, measured in its own process and folder."""
    with tempfile.TemporaryDirectory(prefix="large-models-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log.txt"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", ""]
        command[-1] = json.dumps({**job, "parent": os.getpid(), "began": time.time()})
        with log.open("wb") as file:
            try:
                subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=limit_s)
            except subprocess.TimeoutExpired:
                return {"error": f"not finished after {limit_s:.0f} s", "log": ""}
        outcome = Path(folder) / "outcome.json"
        found: dict[str, Any] = {"error": "the process was killed"}
        if outcome.exists():
            found = json.loads(outcome.read_text(encoding="utf-8"))
        return found | {"log": log.read_text(encoding="utf-8", errors="replace")[-6000:] if "error" in found else ""}


# --- all contenders --------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure all contenders, and print each row when it is measured."""
    options = _options()
    if options.worker:
        be_worker(json.loads(options.worker))
    names = options.only.split(",") if options.only else DEFAULT
    if unknown := [name for name in names if name not in CONTENDERS]:
        sys.exit(f"--only {','.join(unknown)} is not known; use {', '.join(CONTENDERS)}")
    warm_up, steps, workers = (1, 2, 1) if options.tiny else (WARM_UP, options.steps, options.workers)
    job = {
        "tiny": options.tiny, "batch": options.batch, "warm_up": warm_up, "steps": steps, "workers": workers,
        "repeats": options.repeats,
    }  # fmt: skip
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {_device_name()}"
    print(where, flush=True)
    report: dict[str, Any] = {"machine": where, **job, "rows": []}
    ends = time.monotonic() + options.limit_s
    for feed in options.feeds:
        for model in options.models:
            work = WORKLOADS[model](options.tiny, options.batch)
            print(f"\n{work.title}, {'on the device' if feed == 'memory' else 'DataLoader'}, {steps} steps", flush=True)
            print(COLUMNS.format("loop", f"{work.unit}/s", "ms/step", "ratio", "memory, GB", "ready, s"), flush=True)
            rows: list[dict[str, Any]] = []
            for name in names:
                found = _measure({**job, "feed": feed, "model": model, "contender": name}, ends)
                rows.append({"feed": feed, "model": model, "contender": name, **found})
                _print(CONTENDERS[name], work, found, rows[0])
                if options.json:
                    report["rows"].append(rows[-1])
                    options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU with {os.cpu_count()} cores"


def _measure(job: dict[str, Any], ends: float) -> dict[str, Any]:
    package = CONTENDERS[job["contender"]].package
    try:
        found = {"version": version(package)}
    except PackageNotFoundError:
        return {"error": f"{package} is not installed", "log": ""}
    if (left := ends - time.monotonic()) < 5:
        return {"error": "no time left", "log": ""}
    return found | run(job, min(LIMIT_S, left))


def _print(contender: Contender, work: Any, found: dict[str, Any], first: dict[str, Any]) -> None:
    if "error" in found:
        print(f"{contender.title}: {found['error']}\n{found['log']}".rstrip(), flush=True)
        return
    per_s = statistics.median(found["samples_per_s"])
    ratio = f"{per_s / statistics.median(first['samples_per_s']):.2f}" if "error" not in first else "—"
    units, ms = f"{per_s * work.units:,.0f}", f"{1e3 * work.batch / per_s:.1f}"
    memory, ready = f"{found['memory_gb']:.1f}", f"{found['ready_s']:.1f}"
    title = f"{contender.title} ({contender.package} {found['version']})"
    print(COLUMNS.format(title, units, ms, ratio, memory, ready), flush=True)
    if hashes := found.get("hashes"):
        same = f"{len(hashes)} runs" if len(set(hashes)) == 1 else "DIFFERENT"
        print(f"  hash of {same}: {', '.join(sorted({each[:12] for each in hashes}))}", flush=True)
    for warning in found.get("warnings", []):
        print(f"  warning: {warning}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--feeds", nargs="+", choices=("memory", "loader"), default=["memory", "loader"])
    parser.add_argument("--only", help=f"some of {', '.join(CONTENDERS)} (default: {', '.join(DEFAULT)})")
    parser.add_argument("--batch", type=int, help="samples per step (GPT-2 32, others 256)")
    parser.add_argument("--steps", type=int, default=50, help="the number of counted steps")
    parser.add_argument("--repeats", type=int, default=3, help="runs of Paceline, whose hashes are compared")
    parser.add_argument("--workers", type=int, default=8, help="workers of the DataLoaders")
    parser.add_argument("--tiny", action="store_true", help="tiny models and three steps")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="start no contender after this time")
    parser.add_argument("--json", type=Path, help="write all figures to this file after each row")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
