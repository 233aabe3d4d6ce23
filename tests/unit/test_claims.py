"""Figures and limits that several pages state: they agree with each other and with the tables of docs/benchmarks.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.engine.integer_sum import BLOCK

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PAGES = {
    path.name: " ".join(path.read_text(encoding="utf-8").split())
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def rows_of(section: str) -> list[list[str]]:
    """The rows of all tables in a section of the benchmarks, as cells without emphasis."""
    text = BENCHMARKS.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip(" *") for cell in line.split("|")] for line in lines]


def cell(section: str, *beginning: str, column: int, table_row: int = 0) -> float:
    """The first number in a column of the row that begins with these cells; of several such rows, the n-th."""
    found = [row for row in rows_of(section) if row[: len(beginning)] == list(beginning)]
    return value_of(NUMBER.findall(found[table_row][column])[0])


def value_of(number: str) -> float:
    return float(number.replace(",", ""))


def digits_of(number: str) -> int:
    """The significant digits of a number; zeros at the end of a whole number are rounded ones."""
    plain = number.replace(",", "")
    return len((plain.replace(".", "") if "." in plain else plain.rstrip("0")).lstrip("0")) or 1


def is_rounded(number: str, exact: float) -> bool:
    """Whether a number is the exact one, rounded to the digits that it has."""
    return value_of(number) == float(f"{exact:.{digits_of(number) - 1}e}")


def quotes_of(pattern: str) -> list[tuple[str, str]]:
    """Each page with a number that follows this pattern."""
    return [(page, found) for page, text in PAGES.items() for found in re.findall(pattern, text)]


LOOPS, ACROSS, LARGE = "The loop against others", "What exactness costs across ranks", "Larger models"
WITH_LOSS = "Paceline, `step_mode: compile`, `linear_cross_entropy`"
TOKENS, IMAGES = cell(LARGE, "GPT-2", "Paceline", column=2), cell(LARGE, "ResNet-50", "Paceline", column=2)
THEIR_TOKENS, THEIR_IMAGES = (
    cell(LARGE, "Lightning Trainer 2.6.6, compiled", column=1, table_row=place) for place in (0, 1)
)


# What is quoted: the pattern of a quote, the figure in the benchmarks, and the number of quotes there are at least.
QUOTES = {
    "a step of the MNIST network on an H200": (
        r"MNIST(?: network)?[^.;]{0,40} takes ([\d,.]*\d) µs", cell(LOOPS, "Paceline", column=1), 3,
    ),
    "the same in the hand-written loop": (
        r"hand-written (?:DDP )?loop,?(?: it)? takes ([\d,.]*\d) µs", cell(LOOPS, "hand-written DDP", column=1), 2,
    ),
    "tokens of GPT-2 a second with defaults": (r"GPT-2 \(124 M\) trains at ([\d,]*\d) tokens/s", TOKENS, 2),
    "the same in Lightning": (r"tokens/s \(Lightning, compiled: ([\d,]*\d)\)", THEIR_TOKENS, 2),
    "images of ResNet-50 a second with defaults": (r"ResNet-50 at ([\d,]*\d) images/s", IMAGES, 2),
    "the same images in Lightning": (r"images/s \(Lightning, compiled: ([\d,]*\d)\)", THEIR_IMAGES, 2),
    "the lead of GPT-2": (
        r"(\d+) % faster than Lightning's compiled loop", 100 * (TOKENS / THEIR_TOKENS - 1), 2,
    ),
    "what ResNet-50 is slower": (r"ResNet-50 (\d+) % slower", 100 * (1 - IMAGES / THEIR_IMAGES), 1),
    "the memory of GPT-2 with linear_cross_entropy": (
        r"compiled GPT-2 takes ([\d.]+\d) GB", cell(LARGE, WITH_LOSS, column=3), 1,
    ),
    "a compiled step of GPT-2": (
        r"GPT-2 with 32 × 1,024 tokens takes (\d+) ms",
        cell(LARGE, "hand-written, compiled, `cross_entropy`", column=2), 1,
    ),
    "samples a second on two cores": (
        r"single process trains it at ([\d,]*\d) samples",
        1e6 * 64 / cell(LOOPS, "Paceline", "0.1.0", column=2), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUOTES)
def test_a_figure_is_the_same_wherever_it_is_quoted_and_in_the_benchmarks(name: str) -> None:
    pattern, exact, least = QUOTES[name]
    quotes = quotes_of(pattern)
    assert len(quotes) >= least, "a page no longer quotes it in these words"
    assert [(page, number) for page, number in quotes if not is_rounded(number, exact)] == [], exact


def test_the_times_of_saves_are_those_of_the_benchmarks() -> None:
    measured = [row for row in rows_of("How long a save blocks training") if row[1] in ("`torch.save`", "Paceline")]
    quoted = re.findall(r"\| (?:100 MB|3\.1 GB) \| ([\d.]+) s \| ([\d.]+) s \|", PAGES["reliability.md"])
    numbers = [number for pair in quoted for number in pair]
    assert len(numbers) == 8
    for number, row in zip(numbers, measured, strict=True):
        assert is_rounded(number, value_of(row[2])), row


def test_the_accuracy_of_cifar10_fast_is_the_same_everywhere() -> None:
    text = PAGES["benchmarks.md"].partition("## CIFAR-10 to 94 %")[2]
    [mean] = re.findall(r"\*\*(\d+\.\d+) %\*\* of the test images", text)
    source = (ROOT / "src/paceline/recipes/cifar10/cifar10_fast.py").read_text(encoding="utf-8")
    quotes = [
        *quotes_of(r"`cifar10-fast` [^.]*? (\d\d\.\d+) %"),
        *quotes_of(r"`cifar10-fast` reaches .*? (\d\d\.\d+) %"),
    ]
    assert {page for page, _ in quotes} == {"README.md", "recipes.md"}
    assert {number for _, number in quotes} | set(re.findall(r"(\d+\.\d+) % accuracy", source)) == {mean}
    [(least, most)] = re.findall(r"evaluation of each epoch \| ([\d.]+) to ([\d.]+) s", text)
    for quoting in (PAGES["README.md"], PAGES["recipes.md"], source):
        assert f"{float(least):.0f} to {float(most):.0f} s" in quoting


def test_the_hash_of_digits_in_the_examples_is_the_same_everywhere() -> None:
    quotes = quotes_of(r"step 230 val_loss 0\.0339 accuracy 0\.9944 weights (\w+)")
    assert len(quotes) >= 3
    assert len({number for _, number in quotes}) == 1


def test_the_bytes_of_exact_sums_are_the_same_everywhere_and_their_time_is_never_quoted() -> None:
    quotes = quotes_of(r"the bytes of an ordinary all-reduce and 1/(\d+) more")
    assert {number for _, number in quotes} == {str(BLOCK)}
    assert {page for page, _ in quotes} == {"README.md", "scope.md"}
    assert [page for page, text in PAGES.items() if re.search(r"exact sums[^.]* × the time", text, re.I)] == []
    for ranks in (2, 64, 1024):
        ring, integers = (cell(ACROSS, f"{ranks:,}", column=column) for column in (1, 2))
        assert integers == pytest.approx(ring * (1 + 1 / BLOCK), abs=1e-3)


def test_pages_that_mention_several_gpus_say_that_these_were_not_measured() -> None:
    """Change it when there was such a run, together with these pages."""
    mentioned = [
        (page, sentence)
        for page, text in PAGES.items()
        for sentence in re.findall(r"[^.]*more than one GPU[^.]*", text, re.IGNORECASE)
    ]
    assert {"README.md", "ddp.md", "exactness.md", "scope.md"} <= {page for page, _ in mentioned}
    assert [each for each in mentioned if "not been measured" not in each[1]] == []


def test_what_is_out_of_scope_names_the_tools_for_it() -> None:
    for page in ("README.md", "scope.md", "ddp.md"):
        assert re.search(r"FSDP.*torchtitan", PAGES[page]), page
    assert "`--nodes`" in PAGES["ddp.md"].partition("| launcher |")[2].partition("|")[0]
