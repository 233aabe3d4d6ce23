"""What `linear_cross_entropy` costs compared with logits: forward and backward of GPT-2's last layer, on a GPU.

python benchmarks/fused_loss.py --tokens 32768
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, linear

from paceline import linear_cross_entropy

CHUNKS = (2048, 4096, 8192, 16384, 32768)


def with_logits(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(linear(hidden, weight), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--classes", type=int, default=50_257)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(options.tokens, options.features, device=device, requires_grad=True)
    weight = (torch.randn(options.classes, options.features, device=device) / 50).requires_grad_()
    target = torch.randint(options.classes, (options.tokens,), device=device)

    def measure(loss_fn: Callable[..., torch.Tensor], times: int = 10) -> tuple[float, float]:
        """The milliseconds, and the peak memory in gigabytes above that before the call."""
        seconds, before = [], torch.cuda.memory_allocated() if device == "cuda" else 0
        for turn in range(times + 3):
            if device == "cuda":
                torch.cuda.synchronize()
                if turn == 3:
                    torch.cuda.reset_peak_memory_stats()
            since = time.perf_counter()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_fn(hidden, weight, target)
            torch.autograd.grad(loss, (hidden, weight))
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - since)
        peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
        return 1e3 * statistics.median(seconds[3:]), peak / 1e9

    loops: dict[str, Callable[..., torch.Tensor]] = {
        "logits": with_logits,
        "logits, compiled": torch.compile(with_logits, dynamic=False),
    }
    for chunk in CHUNKS:
        if chunk <= max(options.tokens, CHUNKS[0]):
            loops[f"linear_cross_entropy, chunk {chunk}"] = lambda *inputs, chunk=chunk: linear_cross_entropy(
                *inputs, chunk=chunk
            )
    flop = 3 * 2 * options.tokens * options.features * options.classes  # three matrix products
    print(f"torch {torch.__version__}, {options.tokens} tokens × {options.features} → {options.classes}")
    for name, loss_fn in loops.items():
        ms, gigabytes = measure(loss_fn)
        print(f"{name:<36} {ms:9.2f} ms {flop / ms / 1e9:8.1f} TFLOP/s {gigabytes:7.2f} GB", flush=True)


if __name__ == "__main__":
    main()
