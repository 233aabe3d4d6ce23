"""What `run` costs: the same loop in plain DDP and with `run`, measured in turn.

    python benchmarks/own_loop.py [--windows 60] [--models mlp cnn] [--procs 2] [--json out.json]
    python benchmarks/own_loop.py --separate [--rounds 5]

Both loops have the same model, data, batch, AdamW, scheduler and clipping. Paceline has its defaults: exact sums, the
check for finite values, events, TensorBoard, checkpoints, and `run.log` in every step. On a GPU both have one rank and
use bf16. The processes alternate between windows of 50 steps of both loops, so that noise affects them equally; each
window with `run` is compared with the plain ones before and after it. With `--separate`, each loop has processes of its
own, those of plain DDP started by torchrun, for several rounds in turn. The last row compares the managed loop with a
callback without `on_step` to the one without callbacks, by the samples per second in the events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

WINDOW, WARM_UP = 50, 2
STEPS_PER_EPOCH = 200
ON_GPU = torch.cuda.is_available()


# --- models ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block of a CNN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Language(nn.Module):
    """Four layers as in GPT-2: width 768, 12 heads, 512 tokens, and a vocabulary of 8,192."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8192, 768), nn.Embedding(512, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(768, 8192)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        size = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size, device=tokens.device)
        x = self.tokens(tokens) + self.places(torch.arange(size, device=tokens.device))
        return self.head(self.layers(x, mask, is_causal=True)).flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    width, blocks = (32, 10) if ON_GPU else (16, 2)
    middle = [Block(width) for _ in range(blocks)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


# The model, the batch size, the shape of a sample, and the shape of its target.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], tuple[int, ...]]] = {
    "mlp": (mlp, 64, (784,), ()),
    "cnn": (cnn, 128 if ON_GPU else 32, (3, 32, 32), ()),
    "gpt": (Language, 8, (512,), (512,)),
}


def samples(name: str, ranks: int) -> TensorDataset:
    """Random samples for 200 steps an epoch."""
    _, batch, shape, target = MODELS[name]
    size, generator = STEPS_PER_EPOCH * batch * ranks, torch.Generator().manual_seed(0)
    if name == "gpt":
        return TensorDataset(*(torch.randint(8192, (size, *each), generator=generator) for each in (shape, target)))
    inputs = torch.randn(size, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(10, (size, *target), generator=generator))


# --- the two loops --------------------------------------------------------------------------------------------------


class Stopwatch:
    """The seconds per step of each window, and the CPU time of this process."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.restart()

    def restart(self) -> None:
        """Begin a window."""
        self.steps, self.began, self.used = 0, time.perf_counter(), time.process_time()

    def tick(self, loss: torch.Tensor) -> bool:
        """Count a step; returns whether it was the last one of a window."""
        self.steps += 1
        if self.steps < WINDOW:
            return False
        loss.item()  # waits for the device, as a loop does that prints its loss now and then
        self.seconds.append((time.perf_counter() - self.began) / WINDOW)
        self.cpu_seconds.append((time.process_time() - self.used) / WINDOW)
        self.restart()
        return True


def plain_steps(name: str, device: torch.device, steps: int) -> Iterator[torch.Tensor]:
    """Train in plain DDP; yields the loss after each step."""
    make, batch, *_ = MODELS[name]
    data = samples(name, dist.get_world_size())
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(make().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for epoch in range(steps // STEPS_PER_EPOCH):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = cross_entropy(model(x.to(device)), y.to(device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            yield loss


def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, run: Any) -> Any:
    """The same loop with `run`, and windows of the plain loop in turn with its own if the config names one.

    Returns the seconds and CPU seconds per step of the windows, of `run` and of the plain loop.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=run.total_steps)
    run.track(optimizer=optimizer, scheduler=scheduler)
    watch, between = Stopwatch(), PlainWindows(run.model.compared_with, device, run.total_steps)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            with run.autocast():
                loss = cross_entropy(model(x), y.flatten())
            run.backward(loss)
            if run.step(optimizer, clip_norm=1.0):
                scheduler.step()
            run.log(loss=loss)
            if watch.tick(loss):
                between.window()
                watch.restart()
    return [(each.seconds[WARM_UP:], each.cpu_seconds[WARM_UP:]) for each in (watch, between.watch)]


class PlainWindows:
    """Windows of the plain loop between those of a loop with `run`; none without a name."""

    def __init__(self, name: str | None, device: torch.device, steps: int) -> None:
        self.watch, self.steps = Stopwatch(), plain_steps(name, device, steps) if name else iter(())

    def window(self) -> None:
        """Train 50 steps, with torch's default kernels."""
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        self.watch.restart()
        for loss in self.steps:
            if self.watch.tick(loss):
                break
        torch.use_deterministic_algorithms(is_deterministic)


def measure_run(name: str, procs: int, windows: int, folder: Path, compared_with: str | None = None) -> Any:
    """The times of the windows of a loop with `run`, and of the plain loop that is compared with it."""
    make, batch, *_ = MODELS[name]

    def model() -> nn.Module:
        made = make()
        made.compared_with = compared_with  # type: ignore[assignment]
        return made

    return paceline.Trainer(
        name="benchmark-own-loop", model_fn=model, dataset_fn=lambda: samples(name, procs), train_fn=train,
        batch_size=batch, num_epochs=windows * WINDOW // STEPS_PER_EPOCH, val_fraction=0, procs=procs,
        run_dir=tempfile.mkdtemp(dir=folder),
    ).start().value  # fmt: skip


def measure_alone(name: str, procs: int, windows: int, folder: Path) -> list[float]:
    return measure_run(name, procs, windows, folder)[0][0]  # type: ignore[no-any-return]


def measure_plain(name: str, procs: int, windows: int, folder: Path) -> list[float]:
    """The seconds per step of the plain loop in processes of torchrun."""
    note = folder / "note"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={procs}", __file__]
    words = ["--plain", str(note), "--models", name, "--windows", str(windows)]
    subprocess.run([*command, *words], check=True, capture_output=True)
    return json.loads(note.read_text())  # type: ignore[no-any-return]


def train_plain(name: str, windows: int, note: Path) -> None:
    """The plain loop in a process of torchrun; rank 0 writes the seconds per step."""
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    watch = Stopwatch()
    for loss in plain_steps(name, device, windows * WINDOW):
        watch.tick(loss)
    if dist.get_rank() == 0:
        note.write_text(json.dumps(watch.seconds[WARM_UP:]))
    dist.destroy_process_group()


# --- callbacks ------------------------------------------------------------------------------------------------------


class Quiet(paceline.Callback):
    """A callback without `on_step`."""

    def on_evaluate(self, run: Any, metrics: Any) -> None:
        """Called once an epoch."""


def measure_callbacks(callbacks: list[Any], procs: int, windows: int, folder: Path) -> list[float]:
    """The seconds per step of the managed loop, from its events."""
    make, batch, *_ = MODELS["mlp"]
    result = paceline.Trainer(
        name="benchmark-own-loop", model_fn=make, dataset_fn=lambda: samples("mlp", procs), loss_fn=cross_entropy,
        batch_size=batch, num_epochs=windows * WINDOW // STEPS_PER_EPOCH, val_fraction=0, procs=procs,
        callbacks=callbacks, run_dir=tempfile.mkdtemp(dir=folder),
    ).start()  # fmt: skip
    events = map(json.loads, (Path(result.run_dir) / "events.jsonl").read_text().splitlines())
    return [batch * procs / event["samples_per_s"] for event in events if event["event"] == "pace"][WARM_UP:]


# --- the table ------------------------------------------------------------------------------------------------------

Measure = Callable[[int, int, Path], list[float]]


def take_turns(first: Measure, second: Measure, procs: int, rounds: int, windows: int) -> tuple[Any, Any, list[float]]:
    """The seconds per step of two variants with processes of their own, and the ratio of each round."""
    seconds: tuple[list[float], list[float]] = ([], [])
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(rounds):
            medians = [0.0, 0.0]
            for which in (0, 1) if turn % 2 else (1, 0):
                measured = (first, second)[which](procs, windows, Path(name))
                seconds[which].extend(measured)
                medians[which] = statistics.median(measured)
            ratios.append(medians[1] / medians[0])
    return *seconds, ratios


def alternate(name: str, procs: int, windows: int) -> tuple[Any, Any, list[float], list[float]]:
    """The same for both loops in the same processes, with ratios of each window to the plain ones around it."""
    with tempfile.TemporaryDirectory() as folder:
        (own, own_cpu), (plain, plain_cpu) = measure_run(name, procs, windows, Path(folder), name)
    return plain, own, _ratios(own, plain), _ratios(own_cpu, plain_cpu)


def _ratios(own: list[float], plain: list[float]) -> list[float]:
    return [each / ((before + after) / 2) for each, (before, after) in zip(own[1:], pairwise(plain), strict=True)]


def show(what: str, procs: int, first: list[float], second: list[float], *ratios: list[float]) -> dict[str, Any]:
    """Print a row of the table."""
    us = [1e6 * statistics.median(each) for each in (first, second)]
    shown = [statistics.quantiles(each, n=4) if len(each) > 1 else each * 3 for each in ratios]
    cells = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in shown]
    print(f"| {what} | {procs} | {us[0]:,.0f} | {us[1]:,.0f} | {' | '.join(cells)} |", flush=True)
    return {"what": what, "procs": procs, "us": us, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--separate", action="store_true", help="each loop in processes of its own")
    parser.add_argument("--rounds", type=int, default=5, help="with --separate, and of the managed loop")
    parser.add_argument("--windows", type=int, default=60, help=f"of {WINDOW} steps, a multiple of 4")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["cnn", "gpt"] if ON_GPU else ["mlp", "cnn"])
    parser.add_argument("--procs", type=int, default=1 if ON_GPU else 2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        return train_plain(options.models[0], options.windows, options.plain)
    procs, windows = options.procs, options.windows
    device = torch.cuda.get_device_name() if ON_GPU else f"{os.cpu_count()} cores"
    print(f"{device}, torch {torch.__version__}\n")
    print("| loop | ranks | plain DDP, µs | with run, µs | ratio (quartiles) | ratio of CPU time |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in options.models:
        plain, own = partial(measure_plain, name), partial(measure_alone, name)
        turns = partial(take_turns, plain, own, procs, options.rounds, windows)
        rows.append(show(name, procs, *(turns() if options.separate else alternate(name, procs, windows))))
    print("\n| managed loop | ranks | no callback, µs | one without on_step, µs | ratio |\n|---|---|---|---|---|")
    without, with_one = partial(measure_callbacks, []), partial(measure_callbacks, [Quiet()])
    rows.append(show("mlp", procs, *take_turns(without, with_one, procs, options.rounds, windows)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
