"""What `exact` costs on one GPU: deterministic and default kernels, measured in turn on the same step in one run.

python benchmarks/exact_gpu.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "MLP 784-256-10, batch 64": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        (64, 1, 28, 28),
    ),
    "residual CNN, 10 blocks × 32 channels, batch 128": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *[Block() for _ in range(10)], nn.AdaptiveAvgPool2d(1),
                              nn.Flatten(), nn.Linear(32, 10)),
        (128, 3, 32, 32),
    ),
    "embedding 50,000 × 256 and 4 transformer layers, batch 16 × 128": (lambda: Text(), (16, 128)),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50_000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(256, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)).mean(1))


def main() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| model | default, µs | deterministic, µs | ratio |\n|---|---|---|---|")
    for name, (make, shape) in MODELS.items():
        model = make().cuda()
        data = torch.randint(0, 50_000, shape).cuda() if len(shape) == 2 else torch.randn(shape).cuda()
        target = torch.randint(0, 10, (shape[0],)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(12):
            for exact in (False, True):
                torch.use_deterministic_algorithms(exact)
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(30):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(data), target).backward()
                    optimizer.step()
                torch.cuda.synchronize()
                if turn >= 2:
                    times[exact].append((time.perf_counter() - began) / 30 * 1e6)
        default, exact_time = (statistics.median(times[exact]) for exact in (False, True))
        print(f"| {name} | {default:.0f} | {exact_time:.0f} | {exact_time / default:.2f} |")


main()
