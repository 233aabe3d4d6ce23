"""Whether exact sums change what recipes reach: final metrics with `exact` on and off, for several seeds.

    python benchmarks/exact_metrics.py [--recipes digits tabular lm] [--seeds 5]

One process, four lanes. `exact: true` sums integers, `exact: false` floats in the order of the lanes. The data of
`tabular` and `lm` are those of sum_accuracy.py, and `lm` trains for 100 steps only, so that no download is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas
from sum_accuracy import CLASSES, library_text, table_rows


def arguments_of(recipe: str, folder: Path) -> list[str]:
    """What a recipe is started with; writes its data."""
    if recipe == "tabular":
        rows, classes = table_rows(20_000)
        table = pandas.DataFrame(rows.numpy(), columns=[f"c{index:02}" for index in range(rows.shape[1])])
        path = folder / "table.parquet"
        table.assign(kind=classes.numpy()).to_parquet(path)
        named = f"dataset_args={{target: kind, classes: {list(range(CLASSES))}}}"
        return [f"df={path}", named, f"model_args={{features: {rows.shape[1]}, classes: {CLASSES}}}", "num_epochs=6"]
    if recipe == "lm":
        path = folder / "text.txt"
        path.write_text(library_text())
        return [f"dataset_args={{context: 64, path: {path}}}", "max_steps=100"]
    return []


def metrics_of(recipe: str, arguments: list[str], seed: int, exact: bool) -> dict[str, float]:
    """The final metrics of one run."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"seed={seed}", f"exact={str(exact).lower()}", "lanes=4", f"run_dir={folder}/run"]
        command = [sys.executable, "-m", "paceline", "train", recipe, *arguments, *keys, "--procs", "1"]
        done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        metrics: dict[str, float] = json.loads(Path(folder, "run", "result.json").read_text())["metrics"]
        return metrics


def summary(values: list[float]) -> str:
    """Mean, standard deviation and range."""
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=["digits", "tabular", "lm"])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print("| recipe | metric | `exact: true` | `exact: false` |\n|---|---|---|---|", flush=True)
    for recipe in options.recipes:
        results: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        with tempfile.TemporaryDirectory() as folder:
            arguments = arguments_of(recipe, Path(folder))
            for seed in range(options.seeds):
                for exact, metrics in results.items():
                    metrics.append(metrics_of(recipe, arguments, seed, exact))
        for name in results[True][0]:
            cells = [summary([metrics[name] for metrics in results[exact]]) for exact in results]
            print(f"| `{recipe}` | {name} | {cells[0]} | {cells[1]} |", flush=True)


main()
