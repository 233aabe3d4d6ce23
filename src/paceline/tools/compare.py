"""Plain training and DDP: trains a config without DDP and on several numbers of processes, and compares the runs.

If the weights differ, both runs are trained again with a digest of every parameter at every step, which shows the
first parameter and step that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paceline import Result, Trainer
from paceline.config import Config, read_yaml
from paceline.errors import ConfigError
from paceline.observe.events import read
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import new_folder
from paceline.system.cores import chosen_threads

PLAIN = "plain"


@dataclass
class ComparedRun:
    """One run of the comparison."""

    name: str
    procs: int
    seconds: float
    samples_per_s: float
    speed_up: float
    efficiency: float
    train_loss: float | None
    metrics: dict[str, float]
    weights_sha256: str
    run_dir: str


@dataclass
class Comparison:
    """All runs, whether their weights are equal, and an explanation in a sentence."""

    rows: list[ComparedRun]
    is_equal: bool
    verdict: str
    folder: str


def compare(config: Config, procs: Sequence[int], home: Path, log: Callable[[str], None]) -> Comparison:
    """Train without DDP and on each number of processes; writes `compare.json` and `compare.html`.

    `home` is the config's folder. `log` is called with a line before each run.
    """
    config = _with_fixed_sums(config, procs)
    folder = new_folder(config.run_dir, Path("runs") / f"{config.name}-compare")
    results: list[Result] = []
    rows: list[ComparedRun] = []
    for name, number in ((PLAIN, 1), *((f"ddp-{number}", number) for number in procs)):
        log(f"{len(rows) + 1}/{len(procs) + 1}: {'plain, no DDP' if name == PLAIN else f'DDP, processes: {number}'}")
        results.append(_train(config, home, name, number, folder))
        rows.append(_row(name, number, results[-1], rows))
    differing = [row for row in rows if row.weights_sha256 != rows[0].weights_sha256]
    if not differing:
        verdict = f"bitwise identical weights in all {len(rows)} runs: {rows[0].weights_sha256[:12]}"
    else:
        names = ", ".join(row.name for row in differing)
        reason = _likely_reason(config, results[0], rows[0], differing[0])
        verdict = f"the weights of {names} differ from {rows[0].name}: {reason}"
        if config.keeps_state:
            log("the weights differ; training both runs again to find the first difference")
            verdict += f"; {_first_difference(config, home, results[0], (rows[0], differing[0]), folder)}"
    comparison = Comparison(rows, not differing, verdict, str(folder))
    write_json(folder / "compare.json", asdict(comparison))
    curves = {row.name: losses_in(Path(row.run_dir)) for row in rows}
    (folder / "compare.html").write_text(_page(config.name, comparison, curves), encoding="utf-8")
    return comparison


def _with_fixed_sums(config: Config, procs: Sequence[int]) -> Config:
    """The config with the lanes of all runs, or with the threads of all runs if the loop has no lanes."""
    if not config.keeps_state:  # if processes had different numbers of threads, the speed-up would measure threads
        return config.model_copy(update={"threads": config.threads or chosen_threads(max(procs))})
    lanes = config.lanes or max(procs)
    if lanes < max(procs):
        raise ConfigError(f"lanes={lanes} cannot be split over {max(procs)} ranks; set more lanes, or change --procs")
    return config.model_copy(update={"lanes": lanes})


def _train(config: Config, home: Path, name: str, procs: int, folder: Path) -> Result:
    changes = {"procs": procs, "ddp": name != PLAIN, "run_dir": folder / name, "launcher": "local", "resume": "never"}
    changes["checkpoint"] = config.checkpoint.model_copy(update={"mirror": None})
    changes |= {"nodes": None, "rendezvous": None}
    return Trainer.from_config(config.model_copy(update=changes), home).start()


def _row(name: str, procs: int, result: Result, rows: list[ComparedRun]) -> ComparedRun:
    speed = result.samples / max(result.seconds, 1e-9)
    speed_up = speed / rows[0].samples_per_s if rows and rows[0].samples_per_s else 1.0
    return ComparedRun(
        name=name,
        procs=procs,
        seconds=round(result.seconds, 3),
        samples_per_s=round(speed, 1),
        speed_up=round(speed_up, 3),
        efficiency=round(speed_up / procs, 3),
        train_loss=result.history[-1]["train_loss"] if result.history else None,
        metrics=result.metrics,
        weights_sha256=result.weights_sha256,
        run_dir=str(result.run_dir),
    )


def _likely_reason(config: Config, result: Result, first: ComparedRun, other: ComparedRun) -> str:
    """The probable reason for different weights of two runs; `result` is that of the first run."""
    if not config.keeps_state:
        return (
            "your own loop averages over the samples of each process, so its results depend on the number of processes"
        )
    if not config.exact:
        return "with exact: false, gradients are summed in the fastest order"
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in result.model.modules()):
        return "SyncBatchNorm averages over the samples that all processes have at the same time"
    threads = [read_yaml(RunFolder(Path(row.run_dir)).config).get("threads") for row in (first, other)]
    if threads[0] != threads[1]:
        return f"the runs used {threads[0]} and {threads[1]} threads; set threads"
    return "most likely the model or the data uses its own random generator, or reads other input"


def _first_difference(
    config: Config, home: Path, result: Result, rows: tuple[ComparedRun, ComparedRun], folder: Path
) -> str:
    """Train both runs again with digests, and name the first parameter and step that differ."""
    log = config.log.model_copy(update={"every_steps": 1, "digests": True})
    traced = config.model_copy(update={"log": log})
    runs = [_train(traced, home, row.name, row.procs, folder / "traced") for row in rows]
    left, right = (digests_in(run.run_dir) for run in runs)
    parameters = [name for name, _ in result.model.named_parameters()]
    for step in sorted(left.keys() & right.keys()):
        for name, one, other in zip(parameters, left[step], right[step], strict=True):
            if one != other:
                return f"{rows[1].name} differs first in {name}, at step {step}"
    return "the parameters are equal at every step, so a buffer differs"


def losses_in(run_dir: Path) -> list[tuple[int, float]]:
    """The logged losses of a run, each with its step."""
    steps = [event for event in read(RunFolder(run_dir).events) if event["event"] == "step"]
    return [(event["step"], event["loss"]) for event in steps if event.get("loss") is not None]


def digests_in(run_dir: Path) -> dict[int, list[int]]:
    """The digests of all parameters after each step of a run."""
    return {event["step"]: event["digests"] for event in read(RunFolder(run_dir).events) if event["event"] == "digests"}


PAGE = """<!doctype html>
<meta charset="utf-8"><title>{title}</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
  table {{ border-collapse: collapse; }} td, th {{ padding: .25rem .8rem; text-align: right; }}
  td:first-child, th:first-child {{ text-align: left; }} svg {{ width: 100%; height: auto; }}
  tr + tr td {{ border-top: 1px solid #8884; }}
</style>
<h1>{title}</h1><p><b>{verdict}</b></p>
<table><tr><th>run<th>seconds<th>samples/s<th>speed-up<th>efficiency<th>loss<th>weights</tr>{rows}</table>
<h2>Samples per second</h2>{bars}
<h2>Training loss by step</h2>{curves}
"""
COLOURS = ("#8a8a8a", "#3b7dd8", "#e07b39", "#3a9d5d", "#b24bb2", "#c9a227")


def _page(name: str, comparison: Comparison, curves: dict[str, list[tuple[int, float]]]) -> str:
    cells = [
        f"<tr><td>{row.name}<td>{row.seconds:.2f}<td>{row.samples_per_s:,.0f}<td>{row.speed_up:.2f}"
        f"<td>{row.efficiency:.2f}<td>{'' if row.train_loss is None else f'{row.train_loss:.6f}'}"
        f"<td><code>{row.weights_sha256[:12]}</code></tr>"
        for row in comparison.rows
    ]
    return PAGE.format(
        title=f"{name}: plain training and DDP",
        verdict=comparison.verdict,
        rows="".join(cells),
        bars=_bars(comparison.rows),
        curves=_curves(curves),
    )


def _bars(rows: list[ComparedRun]) -> str:
    fastest = max(row.samples_per_s for row in rows) or 1.0
    parts = []
    for place, row in enumerate(rows):
        y, width, speed = 8 + 30 * place, 560 * row.samples_per_s / fastest, f"{row.samples_per_s:,.0f}"
        parts.append(
            f'<text x="0" y="{y + 15}" fill="currentColor" font-size="13">{row.name}</text>'
            f'<rect x="70" y="{y}" width="{width:.1f}" height="20" fill="{COLOURS[place % len(COLOURS)]}"/>'
            f'<text x="{76 + width:.1f}" y="{y + 15}" fill="currentColor" font-size="13">{speed}</text>'
        )
    return f'<svg viewBox="0 0 720 {16 + 30 * len(rows)}">{"".join(parts)}</svg>'


def _curves(curves: dict[str, list[tuple[int, float]]]) -> str:
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "<p>A loop without the argument run logs no losses.</p>"
    last, low, high = max(step for step, _ in points) or 1, min(y for _, y in points), max(y for _, y in points)
    parts = [
        f'<text x="0" y="16" fill="currentColor" font-size="12">{high:.3g}</text>'
        f'<text x="0" y="230" fill="currentColor" font-size="12">{low:.3g}</text>'
        f'<text x="690" y="250" fill="currentColor" font-size="12" text-anchor="end">step {last}</text>'
    ]
    for place, (name, curve) in enumerate(curves.items()):
        # Equal curves cover each other; each is thinner than the one below it, so that all stay visible.
        path = " ".join(
            f"{70 + 620 * s / last:.1f},{230 - 218 * (y - low) / ((high - low) or 1):.1f}" for s, y in curve
        )
        colour, width = COLOURS[place % len(COLOURS)], max(1.2, 7 - 1.8 * place)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(f'<text x="{520}" y="{20 + 16 * place}" fill="{colour}" font-size="13">{name}</text>')
    return f'<svg viewBox="0 0 720 260">{"".join(parts)}</svg>'
