"""Find settings for the recipe `cifar10-fast`: trains its model with plain torch, the whole step as a CUDA graph.

    python benchmarks/cifar_fast_trial.py --root DIR --seeds 3 "epochs=8" "epochs=8,pool=torch" "epochs=7,batch=1500"
    python benchmarks/cifar_fast_trial.py --list                   # the keys of a variant and their defaults
    python benchmarks/cifar_fast_trial.py --root DIR --profile "precision=fp16"
    python benchmarks/cifar_fast_trial.py --smoke                  # random data, tiny sizes, any device

A variant is `key=value,…`; it is built and recorded once, then trained from each seed. It has one row in the table.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from paceline.config import Augmentation
from paceline.data.augment import Augment
from paceline.engine.muon import QUINTIC, Muon

sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "paceline" / "recipes" / "cifar10"))
import cifar10 as files
import cifar10_fast as recipe

COLOURS = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16, "half": torch.float16}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass
class Variant:
    """The settings of a variant. Learning rates and decay are per sample of a batch, as for a loss that is a sum."""

    epochs: float = 9.0
    batch: int = 2000
    widths: str = "64/256/256"
    lr: float = 0.24
    momentum: float = 0.6
    ns: int = 3  # rounds of Newton–Schulz
    muon: str = "paceline"  # or padded: all filters in one stack
    decay: float = 0.1  # of the filters, where they do not keep their norm
    renorm: int = 1  # 1: filters keep their norm, without decay
    bias_lr: float = 0.053
    head_lr: float = 8.3e-4
    rest_decay: float = 2e-6
    rest_momentum: float = 0.85
    whiten: str = "3"  # how long the first layer's bias is trained: all, frozen, or a number of epochs
    smooth: float = 0.2
    schedule: str = "linear"  # or flat: constant, then down over the last `down` of the run
    down: float = 0.5
    warmup: float = 0.0  # share of the run
    final: float = 0.0
    ema: float = 0.0
    precision: str = "bf16"  # fp16, fp32, or half: weights in fp16 too
    act: str = "gelu"  # tanh, relu, silu
    pool: str = "recipe"  # or torch: max_pool2d
    first: str = "plain"  # or padded: the image's 3 channels become 8
    loss: str = "torch"  # or short: label smoothing by hand
    augment: str = "step"  # or epoch: all images at once
    flip: str = "alternating"
    translate: int = 2
    cutout: int = 0
    low: int = 0  # side of the images in the first `low_epochs`
    low_epochs: float = 0.0
    weights_last: int = 0  # 1: weights in channels_last
    graph: int = 1
    benchmark: int = 1  # cuDNN measures its algorithms
    exact: int = 0  # 1: deterministic algorithms, as `exact: true`


def parsed(text: str) -> Variant:
    variant = Variant()
    kinds = {field.name: type(field.default) for field in fields(Variant)}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        setattr(variant, key.strip(), kinds[key.strip()](value))
    return variant


# --- the model -------------------------------------------------------------------------------------------------------


class TrialNet(recipe.FastNet):
    """The recipe's network, with other activations, pooling and first layer."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(tuple(int(width) for width in variant.widths.split("/")))
        self.act, self.pool = ACTIVATIONS[variant.act], variant.pool
        self.is_padded = variant.first == "padded"
        self.whiten.bias.requires_grad_(variant.whiten != "frozen")

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.contiguous(memory_format=torch.channels_last))

    def score(self, images: Tensor) -> Tensor:
        x = self.groups_of(self.act(self.whitened(images)))
        return self.head(F.max_pool2d(x, x.shape[2:]).flatten(1)) / 9

    def whitened(self, images: Tensor) -> Tensor:
        if not self.is_padded:
            return self.whiten(images)
        images, weight = (F.pad(t, (0, 0, 0, 0, 0, 5)) for t in (images, self.whiten.weight))
        return F.conv2d(images.contiguous(memory_format=torch.channels_last), weight, self.whiten.bias)

    def groups_of(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = self.normed(group.first(x), group.first_norm, pool=True)
            x = self.normed(group.second(x), group.second_norm, pool=False)
        return x

    def normed(self, x: Tensor, norm: nn.BatchNorm2d, *, pool: bool) -> Tensor:
        if pool:
            x = F.max_pool2d(x, 2) if self.pool == "torch" else recipe.halved(x)
        return self.act(norm(x))


def smoothed_loss(output: Tensor, target: Tensor, smooth: float) -> Tensor:
    """Cross entropy with label smoothing as one log-softmax and one weighted sum."""
    logs = output.float().log_softmax(1)
    return -((1 - smooth) * logs.gather(1, target[:, None]).sum() + smooth * logs.sum() / logs.shape[1]) / len(logs)


# --- the optimizer ---------------------------------------------------------------------------------------------------


class PaddedMuon:
    """All filters in one stack of matrices, padded with zeros, which stay zero in the iteration."""

    def __init__(self, filters: list[nn.Parameter], lr: Tensor, variant: Variant) -> None:
        self.filters, self.lr, self.variant = filters, lr, variant
        rows = max(len(w) for w in filters)
        columns = max(w[0].numel() for w in filters)
        self.average = torch.zeros(len(filters), rows, columns, device=filters[0].device)
        self.fresh = torch.zeros_like(self.average)

    def parts(self, stack: Tensor) -> list[Tensor]:
        return [m[: len(w), : w[0].numel()].unflatten(1, w.shape[1:]) for m, w in zip(stack, self.filters, strict=True)]

    @torch.no_grad()
    def step(self) -> None:
        variant = self.variant
        torch._foreach_copy_(self.parts(self.fresh), [w.grad for w in self.filters])
        self.average.lerp_(self.fresh, 1 - variant.momentum)
        x = self.fresh.lerp(self.average, variant.momentum)
        x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(torch.bfloat16 if x.is_cuda else torch.float32)
        a, b, c = QUINTIC
        for _ in range(variant.ns):
            square = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
        if not variant.renorm:
            torch._foreach_mul_(self.filters, 1 - self.lr * variant.decay)
        updates = self.parts(x.float() * -self.lr)
        torch._foreach_add_(self.filters, [u.to(w.dtype) for u, w in zip(updates, self.filters, strict=True)])

    def zero(self) -> None:
        self.average.zero_()


@torch.no_grad()
def renormalize(filters: list[nn.Parameter]) -> None:
    norms = torch._foreach_norm(filters)
    torch._foreach_mul_(filters, [len(w) ** 0.5 / norm for w, norm in zip(filters, norms, strict=True)])


# --- training --------------------------------------------------------------------------------------------------------


class Training:
    """One variant, built once; `run` trains it from a seed."""

    def __init__(self, variant: Variant, data: list[Tensor], device: torch.device) -> None:
        self.variant, self.device = variant, device
        torch.backends.cudnn.benchmark = bool(variant.benchmark)
        torch.use_deterministic_algorithms(bool(variant.exact))
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.images, self.labels, self.test_images, self.test_labels = data
        self.batch = min(variant.batch, len(self.images))
        self.per_epoch = len(self.images) // self.batch
        self.total = math.ceil(variant.epochs * self.per_epoch)
        sizes = {self.images.shape[-1]} | ({variant.low} if variant.low_epochs else set())
        self.pictures = {size: resized(self.images, size) for size in sizes}
        section = {"normalize": COLOURS, "flip": variant.flip, "translate": variant.translate, "cutout": variant.cutout}
        self.augment = Augment(Augmentation.model_validate(section), 0)
        self.model = self.fresh_model(0).to(device)
        self.average = [p.detach().clone() for p in self.model.parameters()] if variant.ema else []
        self.order = torch.arange(len(self.images), device=device)
        self.places = torch.arange(self.batch, device=device)
        self.step, self.epoch, self.salt = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
        self.loss = torch.zeros((), device=device)
        self.ready: dict[int, Tensor] = {}
        self.make_optimizer()
        began = time.perf_counter()
        self.replays = {size: self.captured(size) for size in sizes}
        self.prepare_s = time.perf_counter() - began

    def fresh_model(self, seed: int) -> TrialNet:
        torch.manual_seed(seed)
        model = TrialNet(self.variant)
        if self.variant.precision == "half":
            model = model.half()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.float()
        return model.to(memory_format=torch.channels_last) if self.variant.weights_last else model

    def make_optimizer(self) -> None:
        v, model = self.variant, self.model
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.filters = [p for _, p in named if p.dim() == 4]
        biases = [p for name, p in named if p.dim() == 1 and name != "whiten.bias"]
        whiten = [p for name, p in named if name == "whiten.bias"]
        rates = [v.lr, v.bias_lr * self.batch, v.head_lr * self.batch, v.bias_lr * self.batch]
        self.bases = torch.tensor(rates, device=self.device)
        self.rates = self.bases.clone()
        decay = v.rest_decay * self.batch
        groups: list[dict[str, Any]] = [
            {"params": params, "use_muon": False, "lr": rate, "weight_decay": decay / rate}
            for params, rate in zip((biases, [model.head.weight], whiten), rates[1:], strict=True)
        ]
        muon = {"params": self.filters, "lr": v.lr, "momentum": v.momentum, "ns_steps": v.ns}
        muon["weight_decay"] = 0.0 if v.renorm else v.decay
        self.padded = PaddedMuon(self.filters, self.rates[0], v) if v.muon == "padded" else None
        used = [group for group in [muon, *groups] if group["params"]]
        self.optimizer = Muon(used[1:] if self.padded else used, rest={"name": "sgd", "momentum": v.rest_momentum})
        for place, group in enumerate(self.optimizer.param_groups, start=1 if self.padded else 0):
            group["lr"] = self.rates[place]
        # A loss that is a sum keeps gradients in the range of fp16.
        self.scale = float(self.batch) if v.precision in ("fp16", "half") else 1.0
        self.optimizer.grad_scale = torch.full((), self.scale, device=self.device)  # type: ignore[attr-defined]
        self.optimizer.found_inf = torch.zeros((), device=self.device)  # type: ignore[attr-defined]

    def autocast(self) -> Any:
        half = HALF.get(self.variant.precision)
        return (
            torch.autocast(self.device.type, half) if half is not None and self.device.type == "cuda" else nullcontext()
        )

    def set_rates(self) -> None:
        """Set the learning rate of every group at this step, on the device."""
        v, done = self.variant, self.step / self.total
        down = 1 - done if v.schedule == "linear" else ((1 - done) / v.down).clamp(max=1)
        factor = v.final + (1 - v.final) * down
        if v.warmup:
            factor = torch.minimum(factor, (done + 1 / self.total) / v.warmup)
        whiten = factor
        if v.whiten not in ("all", "frozen"):
            whiten = (1 - self.step / (float(v.whiten) * self.per_epoch)).clamp(min=0)
        self.rates.copy_(self.bases * torch.stack([factor, factor, factor, whiten]))

    def take(self, size: int) -> None:
        """Take one step without waiting for the host."""
        v = self.variant
        self.set_rates()
        chosen = self.order[(self.step % self.per_epoch) * self.batch + self.places]
        labels = self.labels[chosen]
        if v.augment == "epoch":
            images = self.ready[size][chosen]
        else:
            images = self.augment.train(self.pictures[size][chosen], chosen + self.salt, self.epoch)
        if v.precision == "half":
            images = images.half()
        with self.autocast():
            output = self.model(images)
            if v.loss == "short":
                loss = smoothed_loss(output, labels, v.smooth)
            else:
                loss = F.cross_entropy(output.float(), labels, label_smoothing=v.smooth)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        (loss * self.scale).backward()
        if v.renorm:
            renormalize(self.filters)
        if self.padded is not None:
            self.padded.step()
        self.optimizer.step()
        if v.ema:
            torch._foreach_lerp_(self.average, list(self.model.parameters()), 1 - v.ema)
        self.loss.copy_(loss.detach())
        self.step += 1

    def captured(self, size: int) -> Callable[[], None]:
        """A function that repeats the step: the replay of a CUDA graph on a GPU, else the step itself."""
        if self.variant.augment == "epoch":
            self.ready[size] = self.augmented(size)
        if self.device.type != "cuda" or not self.variant.graph:
            return lambda: self.take(size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.take(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.take(size)
        return graph.replay

    def augmented(self, size: int) -> Tensor:
        parts = [
            self.augment.train(images, places + self.salt, self.epoch)
            for images, places in zip(self.pictures[size].split(10_000), self.order_of_all.split(10_000), strict=True)
        ]
        half = HALF.get(self.variant.precision, torch.float32) if self.device.type == "cuda" else torch.float32
        return torch.cat([part.to(half) for part in parts]).contiguous(memory_format=torch.channels_last)

    @property
    def order_of_all(self) -> Tensor:
        return torch.arange(len(self.images), device=self.device)

    @torch.no_grad()
    def restart(self, seed: int) -> None:
        state = self.fresh_model(seed).state_dict()
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(state[name])
        for state_of_one in self.optimizer.state.values():
            for tensor in state_of_one.values():
                tensor.zero_()
        if self.padded is not None:
            self.padded.zero()
        for average, p in zip(self.average, self.model.parameters(), strict=False):
            average.copy_(p)
        self.step.zero_()
        self.epoch.zero_()
        self.salt.fill_(seed * 1_000_003)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """The step and the side of its images."""
        full = self.images.shape[-1]
        low_until = self.variant.low_epochs * self.per_epoch
        yield from ((step, self.variant.low if step < low_until else full) for step in range(self.total))

    def run(self, seed: int) -> float:
        """Train from a seed and return the seconds, without the preparation."""
        self.model.train()
        self.restart(seed)
        synchronize(self.device)
        began = time.perf_counter()
        for step, size in self.sizes():
            if step % self.per_epoch == 0:
                self.begin_epoch(step // self.per_epoch, size)
            self.replays[size]()
        synchronize(self.device)
        return time.perf_counter() - began

    def begin_epoch(self, epoch: int, size: int) -> None:
        self.epoch.fill_(epoch)
        torch.randperm(len(self.images), generator=self.generator, device=self.device, out=self.order)
        if self.variant.augment == "epoch":
            self.ready[size].copy_(self.augmented(size))

    @torch.no_grad()
    def accuracy(self, *, views: bool) -> float:
        """The accuracy on the test images."""
        if self.average:
            kept = [p.clone() for p in self.model.parameters()]
            torch._foreach_copy_(list(self.model.parameters()), self.average)
        self.model.eval()
        self.model.views = views
        right = 0.0
        for images, labels in zip(self.test_images.split(2000), self.test_labels.split(2000), strict=True):
            with self.autocast():
                images = self.augment.evaluate(images)
                output = self.model(images.half() if self.variant.precision == "half" else images)
            right += float((output.argmax(1) == labels).sum())
        if self.average:
            torch._foreach_copy_(list(self.model.parameters()), kept)
        return right / len(self.test_images)


def resized(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    parts = [
        F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True, align_corners=False)
        for part in images.split(5000)
    ]
    return torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- the table -------------------------------------------------------------------------------------------------------

COLUMNS = {"acc": 7, "±": 6, "no tta": 7, "train s": 8, "min s": 7, "ms/step": 8, "prep s": 7, "loss": 6, "n": 3}
HEAD = " ".join(f"{name:>{width}}" for name, width in COLUMNS.items()) + "  variant"


def tried(text: str, data: list[Tensor], device: torch.device, seeds: range, deadline: float) -> str:
    """One row: a variant over its seeds."""
    training = Training(parsed(text), data, device)
    if device.type == "cuda":
        training.run(10**6)  # warms up clocks and the allocator
    seconds, with_views, without = [], [], []
    for seed in seeds:
        if seconds and time.perf_counter() > deadline:
            break
        seconds.append(training.run(seed))
        with_views.append(training.accuracy(views=True))
        without.append(training.accuracy(views=False))
    spread = statistics.stdev(with_views) if len(with_views) > 1 else 0.0
    accuracy, plain, mean = (statistics.mean(values) for values in (with_views, without, seconds))
    figures = [
        f"{100 * accuracy:.2f}", f"{100 * spread:.2f}", f"{100 * plain:.2f}", f"{mean:.3f}", f"{min(seconds):.3f}",
        f"{1000 * mean / training.total:.3f}", f"{training.prepare_s:.1f}", f"{float(training.loss):.3f}",
        str(len(seconds)),
    ]  # fmt: skip
    row = " ".join(f"{figure:>{width}}" for figure, width in zip(figures, COLUMNS.values(), strict=True))
    return f"{row}  {text or '(defaults)'}"


def profile(text: str, data: list[Tensor], device: torch.device) -> None:
    """Where the time of a step goes, by kernel."""
    training = Training(parsed(text), data, device)
    training.run(0)
    size = training.images.shape[-1]
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(10):
            training.replays[size]()
        synchronize(device)
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(f"ten steps of {text or '(defaults)'}")
    print(seen.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=90), flush=True)


def random_data(device: torch.device, samples: int) -> list[Tensor]:
    images = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (samples,))
    return [tensor.to(device) for tensor in (images, labels, images[: samples // 4], labels[: samples // 4])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=[""])
    parser.add_argument("--root", help="the folder with CIFAR-10's binary files")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=540)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=50_000, help="train on fewer images")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--random", action="store_true", help="random images, to measure only the time")
    parser.add_argument("--held-out", type=int, default=0, help="test on this many images of the training set instead")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{field.name}={field.default}" for field in fields(Variant)))
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for exact=1
    deadline = time.perf_counter() + args.limit_s
    device = torch.device(args.device)
    if args.smoke:
        data = random_data(device, 80)
        tiny = "epochs=2,batch=20,widths=8/16/16"
        args.variants = [tiny + ("," + variant if variant else "") for variant in args.variants]
    elif args.random:
        data = random_data(device, 50_000)
    else:
        training, test = files.get_dataset(args.root), files.get_test_dataset()
        data = [tensor.to(device) for tensor in (*training.tensors, *test.tensors)]
        if args.held_out:
            data = [*(t[: -args.held_out] for t in data[:2]), *(t[-args.held_out :] for t in data[:2])]
        data[:2] = [tensor[: args.samples] for tensor in data[:2]]
    print(torch.__version__, torch.cuda.get_device_name() if device.type == "cuda" else "cpu", flush=True)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows = []
    for text in args.variants:
        if time.perf_counter() > deadline:
            print(f"no time left for {text}", flush=True)
            continue
        try:
            if args.profile:
                profile(text, data, device)
                continue
            rows.append(tried(text, data, device, seeds, deadline))
            print(rows[-1], flush=True)
        except Exception as error:  # noqa: BLE001 - the next variant may work
            traceback.print_exc()
            rows.append(f"{'failed':>7}  {text}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            print(rows[-1], flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("", HEAD, *rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
