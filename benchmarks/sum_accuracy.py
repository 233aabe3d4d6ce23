"""How accurate sums of gradients over lanes are, compared with sums in 64 bits.

    python benchmarks/sum_accuracy.py [--model gpt2 cnn tabular] [--precision fp32 bf16] [--steps 10] [--lanes 8]
        [--device cuda]

Each model is trained for some steps of AdamW first, so that its gradients are typical; those of the last step are kept
lane by lane and summed in several ways. Models: GPT-2 with 124 M parameters (transformers), random weights, on words of
Python's standard library; the residual network of `paceline bench`, on noise as there; the model of the `tabular`
recipe, on a random table in the form of Covertype.

A cell of the table is the relative L2 error of all gradients together, and in brackets the share of elements whose
error is larger than 0.1 %. Two rows sum the same gradients on the grids of 64 and of 1,024 lanes.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.engine.integer_sum import IntegerSum, Scratch
from paceline.recipes.tabular import tabular
from paceline.tools.bench.models import cifar_samples, residual_network

MARGIN = 1e-3  # the relative error from which an element is counted
CLASSES, NUMBERS, KINDS = 7, 10, 44  # of the table: classes of rows, columns of numbers, columns of zeros and ones
LENGTH, VOCABULARY = 128, 50_257
Tensors = list[torch.Tensor]


# --- data and models -------------------------------------------------------------------------------------------------


def library_text() -> str:
    """The sources of Python's standard library, without packages: about 9 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py")))


def table_rows(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows in the form of Covertype, and classes that depend on them with some noise."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(size, NUMBERS, generator=generator)
    kinds = torch.zeros(size, KINDS).scatter_(1, torch.randint(KINDS, (size, 1), generator=generator), 1.0)
    rows = torch.cat([numbers, kinds], 1)
    hidden = torch.tanh(rows @ torch.randn(NUMBERS + KINDS, 32, generator=generator))
    scores = hidden @ torch.randn(32, CLASSES, generator=generator)
    return rows, (scores + torch.randn(scores.shape, generator=generator)).argmax(1)


class LanguageModel(nn.Module):
    """GPT-2 124 M with a tensor as output, and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.model(words, use_cache=False).logits.flatten(0, 1)


def words_of_library() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of words, numbered by their frequency, and the words that follow them."""
    words = re.findall(r"\w+|[^\w ]", library_text())
    numbers = {word: index for index, (word, _) in enumerate(collections.Counter(words).most_common(VOCABULARY - 1))}
    text = torch.tensor([numbers.get(word, VOCABULARY - 1) for word in words])
    return text[:-1].unfold(0, LENGTH, LENGTH), text[1:].unfold(0, LENGTH, LENGTH)


@dataclass(frozen=True)
class Case:
    """A model, its samples as inputs and targets, the samples of a lane and the learning rate."""

    title: str
    model_fn: Callable[[], nn.Module]
    samples_fn: Callable[[], tuple[torch.Tensor, ...]]
    batch_size: int
    lr: float


CASES = {
    "gpt2": Case("GPT-2 124 M", LanguageModel, words_of_library, 1, 6e-4),
    "cnn": Case("CNN", residual_network, lambda: cifar_samples().tensors, 16, 1e-3),
    "tabular": Case("`tabular`", tabular.get_model, lambda: table_rows(20_000), 128, 3e-3),
}


def gradients_of(case: Case, precision: str, steps: int, lanes: int, device: str) -> list[Tensors]:
    """The gradients of each lane of the last step."""
    torch.manual_seed(0)
    model, (inputs, targets) = case.model_fn().to(device), (each.to(device) for each in case.samples_fn())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=case.lr, fused=True)
    order = torch.randperm(len(inputs)).to(device).split(case.batch_size)
    batches: Iterator[torch.Tensor] = itertools.chain.from_iterable(itertools.repeat(order))
    for _ in range(steps):
        optimizer.step()  # with the gradients of the step before
        of_lanes = []
        for _ in range(lanes):
            optimizer.zero_grad()
            rows = next(batches)
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                loss = cross_entropy(model(inputs[rows]), targets[rows].flatten())
            loss.backward(torch.full_like(loss, 1 / lanes))
            of_lanes.append([parameter.grad for parameter in parameters])
        for parameter, *gradients in zip(parameters, *of_lanes, strict=True):
            parameter.grad = in_order(gradients)
    return of_lanes


# --- sums ------------------------------------------------------------------------------------------------------------


def in_order(lanes: Sequence[torch.Tensor]) -> torch.Tensor:
    total = lanes[0].clone()
    for lane in lanes[1:]:
        total += lane
    return total


def in_pairs(lanes: Sequence[torch.Tensor]) -> torch.Tensor:
    middle = len(lanes) // 2
    return in_pairs(lanes[:middle]) + in_pairs(lanes[middle:]) if middle else lanes[0]


def as_integers(lanes: Sequence[torch.Tensor], room: int, scratch: Scratch) -> torch.Tensor:
    """What Paceline computes, for steps of `room` lanes."""
    total, of_lanes = IntegerSum(lanes[:1], room, scratch), [[lane] for lane in lanes]
    total.integers(of_lanes, total.exponents(of_lanes))
    result = torch.empty_like(lanes[0])
    total.write([result])
    return result


def sums_for(lanes: int) -> dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]]:
    scratch = Scratch()

    def integers_for(room: int) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        return lambda gradients: as_integers(gradients, room, scratch)

    return {
        "fp32, tree of pairs": in_pairs,
        "fp32, in order": in_order,
        "fp32, backwards": lambda gradients: in_order(gradients[::-1]),
        "**integers** (`exact: true`)": integers_for(lanes),
        "integers on the grid of 64 lanes": integers_for(64),
        "integers on the grid of 1,024 lanes": integers_for(1024),
        "`compression: bf16`": lambda gradients: in_order([each.bfloat16() for each in gradients]),
    }


def errors_of(of_lanes: list[Tensors]) -> dict[str, str]:
    """The cell of the table for each sum."""
    sums = sums_for(len(of_lanes))
    squares, wrong = collections.Counter[str](), collections.Counter[str]()
    size, square = 0, 0.0
    for lanes in zip(*of_lanes, strict=True):  # parameter by parameter, to save memory
        right = in_order([lane.double() for lane in lanes])
        size, square = size + right.numel(), square + right.square().sum().item()
        for name, summed in sums.items():
            error = summed(lanes).double().sub_(right).abs_()
            squares[name] += error.square().sum().item()
            wrong[name] += int((error > MARGIN * right.abs()).sum())
    return {name: f"{(squares[name] / square) ** 0.5:.1e} ({wrong[name] / size:.0e})" for name in sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    columns: dict[str, dict[str, Any]] = {}
    for key, precision in itertools.product(options.model, options.precision):
        of_lanes = gradients_of(CASES[key], precision, options.steps, options.lanes, options.device)
        columns[f"{CASES[key].title}, {precision}"] = errors_of(of_lanes)
    print(f"| sum of {options.lanes} lanes | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name in sums_for(options.lanes):
        print(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")


if __name__ == "__main__":
    main()
