"""Throughput of two large models on one GPU, with Paceline, hand-written loops, Lightning and Hugging Face.

python benchmarks/large_models.py --model gpt2
python benchmarks/large_models.py --model resnet50 --only compile,paceline-compile --json resnet50.json
python benchmarks/large_models.py --tiny            # a quick check, also on a CPU

GPT-2 has 124 M parameters (transformers, random weights, no dropout, attention without a mask), 1,024 tokens per sample, AdamW;
ResNet-50 (transformers) takes 224 × 224 pixels, channels last, SGD with momentum. Both in bf16 autocast (fp32 on a CPU) on random
data. Optimizers are fused.

Each contender runs in its own process. Windows of steps are timed, with the device synchronized at their ends; the first two
windows, with all compilation and recording, are not counted. To compare only the computation, the data is on the
GPU for the hand-written loops, as it is by default for Paceline (a `TensorDataset`). Lightning's and Hugging Face's Trainers read the
same `TensorDataset` with a DataLoader with pinned memory and `--workers` processes, as their users would.

The share is relative to the FLOP/s of a product of two 8192 × 8192 matrices in bf16 on this GPU, with 6 FLOP per
parameter and token and 12 × layers × width × length per token for attention (GPT-2), 3 × 8.2 GFLOP per image (ResNet-50).
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, default_collate

from paceline import Trainer, linear_cross_entropy
from paceline.system.processes import die_with_parent
from paceline.tools.bench.bench import version_of
from paceline.tools.bench.processes import window_of
from paceline.tools.bench.setup import WindowTimer

WARM_UP = 2  # windows that are not counted
LIMIT_S = 900.0  # for one contender
COLUMNS = "{:<42} {:<22} {:>12} {:>9} {:>7} {:>15} {:>8}"


# --- models ----------------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """A model of transformers with a tensor as input and output."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
        logits: torch.Tensor = self.model(x, **self.options).logits
        return logits


class Hidden(nn.Module):
    """GPT-2 without its last layer; returns the weight of that layer too, for a loss that needs no logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.transformer(x, use_cache=False).last_hidden_state, self.model.lm_head.weight


class WithLoss(nn.Module):
    """A model with the interface of transformers, which returns its loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss_fn(self.model(x), labels)}


def of_logits(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy, of images or of tokens."""
    return cross_entropy(logits.flatten(0, -2), target.flatten())


def of_hidden(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor, chunk: int = 8192) -> torch.Tensor:
    """The same without the logits."""
    return linear_cross_entropy(*output, target, chunk=chunk)


def causal_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention without a mask, so that torch uses its fastest kernel.

    The function of transformers creates a mask when it is compiled, and otherwise waits for the device to check it.
    """
    assert mask is None
    mixed = scaled_dot_product_attention(query, key, value, scale=options.get("scaling"), is_causal=True)
    return mixed.transpose(1, 2).contiguous(), None


class Gpt2:
    """GPT-2 124 M, or a tiny one."""

    unit = "tokens"

    def __init__(self, tiny: bool, batch: int | None) -> None:
        self.layers, self.width, self.length, self.classes = (2, 64, 32, 257) if tiny else (12, 768, 1024, 50_257)
        self.batch, self.units_per_sample = batch or (4 if tiny else 32), self.length
        self.title = f"GPT-2, {self.layers} layers × {self.width}, batch {self.batch} × {self.length}"

    def model(self, has_logits: bool = True) -> nn.Module:
        """The model; without logits it returns the last hidden states and the weight of the last layer."""
        from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

        AttentionInterface.register("causal", causal_attention)
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=self.layers, n_head=self.width // 64, n_embd=self.width, n_positions=self.length,
            vocab_size=self.classes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            attn_implementation="causal",
        )  # fmt: skip
        made = GPT2LMHeadModel(config)
        return Logits(made, {"use_cache": False}) if has_logits else Hidden(made)

    def dataset(self, samples: int) -> TensorDataset:
        tokens = torch.randint(self.classes, (samples, self.length + 1), generator=torch.Generator().manual_seed(0))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    optimizer = {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1}  # noqa: RUF012

    def flops_per_unit(self, parameters: int) -> float:
        return 6 * parameters + 12 * self.layers * self.width * self.length


class ResNet50:
    """ResNet-50, or a tiny residual network."""

    unit = "images"
    units_per_sample = 1

    def __init__(self, tiny: bool, batch: int | None) -> None:
        self.is_tiny, self.side, self.batch = tiny, 32 if tiny else 224, batch or (4 if tiny else 256)
        self.title = f"ResNet-{'tiny' if tiny else 50}, {self.side} × {self.side}, batch {self.batch}"

    def model(self, has_logits: bool = True) -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        torch.manual_seed(0)
        small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        made = ResNetForImageClassification(ResNetConfig(num_labels=1000, **(small if self.is_tiny else {})))
        return Logits(made.to(memory_format=torch.channels_last), {})

    def dataset(self, samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(samples, 3, self.side, self.side, generator=generator)
        # In bf16, which the first convolution uses: half the bytes for the DataLoaders.
        images = images.bfloat16() if torch.cuda.is_available() else images
        return TensorDataset(images, torch.randint(1000, (samples,), generator=generator))

    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}  # noqa: RUF012

    def flops_per_unit(self, parameters: int) -> float:
        return 3 * 8.2e9 * (self.side / 224) ** 2


WORKLOADS: dict[str, Callable[[bool, int | None], Any]] = {"gpt2": Gpt2, "resnet50": ResNet50}


# --- the loops ------------------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """The settings that all contenders share."""

    work: Any
    steps: int  # including warm-up
    window: int
    workers: int
    chunk: int
    device: torch.device
    timer: WindowTimer

    @property
    def samples(self) -> int:
        """The samples of one window."""
        return self.window * self.work.batch

    def autocast(self) -> AbstractContextManager[Any]:
        is_cuda = self.device.type == "cuda"
        return torch.autocast("cuda", dtype=torch.bfloat16) if is_cuda else nullcontext()

    def with_loss(self, has_logits: bool = True) -> WithLoss:
        loss_fn = of_logits if has_logits else partial(of_hidden, chunk=self.chunk)
        return WithLoss(self.work.model(has_logits), loss_fn).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        options = dict(self.work.optimizer)
        make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options.pop("name")]
        return make(model.parameters(), fused=True, **options)

    def loader(self, **options: Any) -> DataLoader[Any]:
        """One long epoch over the data."""
        dataset = self.work.dataset(self.samples)
        sampler = RandomSampler(dataset, replacement=True, num_samples=self.steps * self.work.batch)
        return DataLoader(
            dataset, batch_size=self.work.batch, sampler=sampler, num_workers=self.workers,
            pin_memory=self.device.type == "cuda", persistent_workers=self.workers > 0, **options,
        )  # fmt: skip


def by_hand(setting: Setting, *, compiled: bool, has_logits: bool = True) -> int:
    """A loop without any library, with data on the device. Returns the number of parameters, like all loops."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    model: Any = setting.with_loss(has_logits)
    optimizer = setting.optimizer(model)
    loss_of = torch.compile(model, dynamic=False) if compiled else model
    batches = _endless([tensor.to(setting.device) for tensor in setting.work.dataset(setting.samples).tensors], setting)
    total = torch.zeros((), device=setting.device)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            loss = loss_of(x, y)["loss"]
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if setting.timer.tick():
            break
    return _size(model)


def _endless(tensors: list[torch.Tensor], setting: Setting) -> Iterator[tuple[torch.Tensor, ...]]:
    while True:
        yield from zip(*(tensor.split(setting.work.batch) for tensor in tensors), strict=True)


def lightning(setting: Setting) -> int:
    """Lightning's Trainer around a compiled model."""
    import lightning

    torch.set_float32_matmul_precision("high")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = setting.with_loss()
            self.loss_of = torch.compile(self.model, dynamic=False)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.loss_of(*batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setting.optimizer(self.model)

    class Ticks(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            setting.timer.tick()

    is_cuda = setting.device.type == "cuda"
    module = Module()
    lightning.Trainer(
        accelerator=setting.device.type, devices=1, precision="bf16-mixed" if is_cuda else "32-true", benchmark=True,
        max_epochs=1, max_steps=setting.steps, callbacks=[Ticks()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, setting.loader())  # fmt: skip
    return _size(module.model)


def transformers(setting: Setting) -> int:
    """Hugging Face's Trainer, which compiles the model."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            setting.timer.tick()

    class OurLoader(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(setting.loader(collate_fn=_named))

    is_cuda = setting.device.type == "cuda"
    arguments = TrainingArguments(
        output_dir="transformers", use_cpu=not is_cuda, per_device_train_batch_size=setting.work.batch,
        max_steps=setting.steps, bf16=is_cuda, torch_compile=True, lr_scheduler_type="constant", max_grad_norm=0.0,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    model = setting.with_loss()
    OurLoader(
        model, arguments, train_dataset=setting.work.dataset(setting.samples), callbacks=[Ticks()],
        optimizers=(setting.optimizer(model), None),
    ).train()  # fmt: skip
    return _size(model)


def _named(samples: list[Any]) -> dict[str, torch.Tensor]:
    x, labels = default_collate(samples)
    return {"x": x, "labels": labels}


def paceline(setting: Setting, *, has_logits: bool = True, **options: Any) -> int:
    """Paceline in this process, with one rank; the times are those of its events."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    work = setting.work
    result = Trainer(
        model_fn=partial(work.model, has_logits), dataset_fn=partial(work.dataset, setting.samples),
        loss_fn=of_logits if has_logits else partial(of_hidden, chunk=setting.chunk), optimizer=work.optimizer,
        batch_size=work.batch, num_epochs=setting.steps // setting.window, val_fraction=0.0, launcher="torchrun",
        device=setting.device.type, log={"every_steps": setting.window}, **options,
    ).start()  # fmt: skip
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    for event in events:
        if event["event"] == "warning":
            print(f"warning: {event['text']}", flush=True)
    points = [event for event in events if event["event"] == "pace"]
    setting.timer.seconds = [setting.samples / event["samples_per_s"] for event in points]
    setting.timer.since = points[-1]["time"]
    return _size(result.load_model())


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class Contender:
    """A row of the table."""

    title: str
    package: str
    loop: Callable[[Setting], int]
    needs_tokens: bool = False


CONTENDERS = {
    "eager": Contender("by hand", "torch", partial(by_hand, compiled=False)),
    "compile": Contender("by hand, compiled", "torch", partial(by_hand, compiled=True)),
    "compile-loss": Contender(
        "by hand, compiled, linear_cross_entropy", "torch", partial(by_hand, compiled=True, has_logits=False), True
    ),
    "lightning": Contender("Lightning Trainer, compiled", "lightning", lightning),
    "transformers": Contender("Hugging Face Trainer, compiled", "transformers", transformers),
    "paceline": Contender("Paceline", "paceline", paceline),
    "paceline-compile": Contender("Paceline, compile", "paceline", partial(paceline, step_mode="compile")),
    "paceline-loss": Contender(
        "Paceline, compile, linear_cross_entropy", "paceline",
        partial(paceline, step_mode="compile", has_logits=False), True,
    ),
    "paceline-inexact": Contender(
        "Paceline, compile, exact: false", "paceline", partial(paceline, step_mode="compile", exact=False)
    ),
    "paceline-loss-inexact": Contender(
        "Paceline, the same, exact: false", "paceline",
        partial(paceline, step_mode="compile", has_logits=False, exact=False), True,
    ),
}  # fmt: skip


# --- one contender in one process ------------------------------------------------------------------------------------


def matrix_rate(device: torch.device) -> dict[str, Any]:
    """The FLOP/s of a large matrix product."""
    is_cuda = device.type == "cuda"
    side, dtype, times = (8192, torch.bfloat16, 50) if is_cuda else (512, torch.float32, 5)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timer = WindowTimer(5 * times, times, device)
    for _ in range(5 * times):
        torch.mm(left, right)
        timer.tick()
    gpu = torch.cuda.get_device_name(device) if is_cuda else None
    return {"flops_per_s": 2 * side**3 * times / statistics.median(timer.seconds[1:]), "gpu": gpu}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """The figures of one contender."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if job["contender"] == "rate":
        return matrix_rate(device)
    work = WORKLOADS[job["model"]](job["tiny"], job["batch"])
    window = window_of(job["steps"], job["steps"])
    steps = WARM_UP * window + job["steps"] // window * window
    timer, began = WindowTimer(steps, window, device), time.time()
    setting = Setting(work, steps, window, job["workers"], job["chunk"], device, timer)
    parameters = CONTENDERS[job["contender"]].loop(setting)
    timed = timer.seconds[WARM_UP:]
    is_paceline = job["contender"].startswith("paceline")
    first = timer.since - sum(timed) if is_paceline else began + sum(timer.seconds[:WARM_UP])
    s_per_step = statistics.median(timed) / window
    per_s = work.batch * work.units_per_sample / s_per_step
    memory = torch.cuda.memory_stats() if device.type == "cuda" else {}
    return {
        "ms_per_step": 1e3 * s_per_step,
        "per_s": per_s,
        "flops_per_s": per_s * work.flops_per_unit(parameters),
        "peak_allocated_gb": memory.get("allocated_bytes.all.peak", 0) / 1e9,
        "peak_reserved_gb": memory.get("reserved_bytes.all.peak", 0) / 1e9,
        "ready_s": first - job["began"],
        "windows_s": timed,
        "parameters": parameters,
    }


def be_worker(job: dict[str, Any]) -> None:
    """Measure, and write the figures to a file."""
    die_with_parent(job["parent"])
    try:
        outcome = measure(job)
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
                return {"error": f"not done after {limit_s:.0f} s"}
        outcome = Path(folder) / "outcome.json"
        output = log.read_text(encoding="utf-8", errors="replace")
        found = json.loads(outcome.read_text(encoding="utf-8")) if outcome.exists() else {"error": "it died"}
    warnings = [line for line in output.splitlines() if line.startswith("warning: ")]
    return found | {"log": output[-6000:] if "error" in found else "", "warnings": warnings}


# --- all contenders --------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure all contenders, and print each row when it is measured."""
    options = _options()
    if options.worker:
        be_worker(json.loads(options.worker))
    models = [options.model] if options.model else list(WORKLOADS)
    names = options.only.split(",") if options.only else list(CONTENDERS)
    if unknown := [name for name in names if name not in CONTENDERS]:
        sys.exit(f"--only {','.join(unknown)} is not known; use {', '.join(CONTENDERS)}")
    steps, workers = options.steps or (10 if options.tiny else 50), 0 if options.tiny else options.workers
    base = {
        "tiny": options.tiny, "steps": steps, "workers": workers, "chunk": options.chunk, "batch": options.batch
    }  # fmt: skip
    ends = time.monotonic() + options.limit_s
    rate = run({**base, "contender": "rate", "model": ""}, LIMIT_S)
    if "error" in rate:
        sys.exit(f"{rate['error']}\n{rate['log']}")
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {rate['gpu'] or 'CPU'}"
    print(f"{where}; products reach {rate['flops_per_s'] / 1e12:,.1f} TFLOP/s", flush=True)
    report: dict[str, Any] = {"machine": where, "rate": rate["flops_per_s"], **base, "rows": []}
    longest = 0.0
    for model in models:
        work = WORKLOADS[model](options.tiny, options.batch)
        print(f"\n{work.title}, {steps} steps", flush=True)
        print(COLUMNS.format("loop", "version", f"{work.unit}/s", "ms/step", "peak", "memory, GB", "ready, s"))
        for name in names:
            contender = CONTENDERS[name]
            if contender.needs_tokens and model != "gpt2":
                continue
            version, left = version_of(contender.package), ends - time.monotonic()
            if version is None or left < longest:
                print(f"{contender.title}: {'not installed' if version is None else 'no time left'}", flush=True)
                continue
            since = time.monotonic()
            found = run({**base, "model": model, "contender": name}, min(LIMIT_S, left))
            longest = max(longest, time.monotonic() - since)
            report["rows"].append({"model": model, "contender": name, "version": version, **found})
            _print(contender, version, found, rate["flops_per_s"])
            if options.json:
                options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _print(contender: Contender, version: str, found: dict[str, Any], rate: float) -> None:
    if "error" in found:
        print(f"{contender.title}: {found['error']}\n{found['log']}", flush=True)
        return
    print(
        COLUMNS.format(
            contender.title, f"{contender.package} {version}", f"{found['per_s']:,.0f}", f"{found['ms_per_step']:.2f}",
            f"{found['flops_per_s'] / rate:.1%}",
            f"{found['peak_allocated_gb']:.1f} / {found['peak_reserved_gb']:.1f}", f"{found['ready_s']:.1f}",
        ),
        *(f"\n  {warning}" for warning in found["warnings"]),
        flush=True,
    )  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, help="measure only this model")
    parser.add_argument("--only", help=f"some of {', '.join(CONTENDERS)}")
    parser.add_argument("--batch", type=int, help="samples per step (GPT-2 32, ResNet-50 256)")
    parser.add_argument("--steps", type=int, help="the number of timed steps (50)")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per chunk of linear_cross_entropy")
    parser.add_argument("--workers", type=int, default=8, help="workers of the DataLoaders")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="start no contender that would end later")
    parser.add_argument("--json", type=Path, help="write all figures to this file after each row")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
