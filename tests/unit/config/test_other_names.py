"""Names of other libraries: what an unknown key is answered, and the table in docs/coming_from.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Config, override
from paceline.config.messages import _known_keys
from paceline.config.other_names import TABLE, Row
from paceline.config.yaml import parse
from support.configs import MANAGED, problems

DOCS = Path(__file__).parents[3] / "docs" / "coming_from.md"
COLUMNS = ("Lightning", "transformers", "Accelerate", "torchrun, scripts", "Paceline")
ROWS = [row for rows in TABLE.values() for row in rows]


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        ({"learning_rate": 0.01}, "learning_rate=0.01 is called optimizer.lr here; write optimizer: {lr: 0.01}"),
        ({"epochs": 4}, "epochs=4 is called num_epochs here; write num_epochs: 4"),
        ({"fp16": True}, "fp16=True is called precision here; write precision: fp16"),
        ({"amp": False}, "amp=False is called precision here; write precision: fp32"),
        ({"optim": "adamw_torch"}, "optim='adamw_torch' is called optimizer.name here; write optimizer: {name: adamw}"),
        (
            {"scheduler": "ReduceLROnPlateau"},
            "scheduler='ReduceLROnPlateau' is called schedule.name here; write schedule: {name: plateau}",
        ),
        ({"report_to": "wandb"}, "report_to='wandb' is called log.trackers here; write log: {trackers: wandb}"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0 is called clip_norm here; write clip_norm: 1.0"),
        ({"num_nodes": 2}, "num_nodes=2 is called nodes here; write nodes: 2, with rendezvous: HOST:PORT"),
        ({"profiler": "simple"}, "profiler='simple' is not a key here; run paceline profile CONFIG"),
        (
            {"accumulate_grad_batches": 4},
            "accumulate_grad_batches=4 is called lanes here; write lanes: 4, times the number of processes, whose "
            "micro-batches it counts",
        ),
    ],
)
def test_a_key_of_another_library_is_answered_with_the_words_to_write(raw: dict[str, Any], answer: str) -> None:
    assert problems({**MANAGED, **raw}) == [answer]


def test_a_key_of_another_library_inside_a_section_is_answered() -> None:
    raw = {
        "checkpoint": {"save_total_limit": 2, "monitor": "accuracy"},
        "optimizer": {"learning_rate": 0.1, "warmup_steps": 5},
    }
    assert problems({**MANAGED, **raw}) == [
        "checkpoint.save_total_limit=2 is called checkpoint.keep here; write checkpoint: {keep: 2}",
        "checkpoint.monitor='accuracy' is called checkpoint.best.metric here; "
        "write checkpoint: {best: {metric: accuracy, mode: min}}, or mode: max",
        "optimizer.learning_rate=0.1 is called optimizer.lr here; write optimizer: {lr: 0.1}",
        "optimizer.warmup_steps=5 is called schedule.warmup_steps here; write schedule: {warmup_steps: 5}",
    ]


def test_a_key_of_another_library_on_the_command_line_is_answered() -> None:
    raw: dict[str, Any] = dict(MANAGED)
    override(raw, ["fast_dev_run=true"])
    assert problems(raw) == [
        "fast_dev_run=True is called max_steps here; write max_steps: 1; paceline doctor CONFIG also tries one step"
    ]


def test_an_object_as_a_value_is_not_repeated_as_words_to_write() -> None:
    [problem] = problems({**MANAGED, "model": object()})
    assert problem.endswith("is called model_fn here; write model_fn: …, a function that returns the model")


def keys_in(tree: Any, sections: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all keys in a piece of YAML."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield (*sections, key)
        yield from keys_in(value, (*sections, key))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_the_words_to_write_are_keys_of_a_config(row: Row) -> None:
    advised = [row.write, *(text.removeprefix("write ") for text in row.values.values() if text.startswith("write "))]
    for text in filter(None, advised):
        for *sections, key in keys_in(parse(text.partition("; ")[0].partition(", and")[0].partition(", with")[0])):
            is_free = sections == ["optimizer"]  # further keys go to the optimizer's constructor
            assert is_free or key in _known_keys(sections)


def test_no_name_of_another_library_is_a_key_of_its_own() -> None:
    assert [name for row in ROWS for name in row.names if name in Config.model_fields] == []


def names_cell(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def table_text() -> str:
    """The table as it is printed in the documentation."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for title, rows in TABLE.items():
        lines.append(f"| **{title}** | | | | |")
        for row in rows:
            written = f"`{row.write}`".replace("VALUE", "…") if row.write else ""
            here = ", ".join(filter(None, (written, row.note.replace("VALUE", "…"))))
            names = map(names_cell, (row.lightning, row.transformers, row.accelerate, row.others))
            lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in (*names, here)) + "|")
    return "\n".join(lines)


def test_the_documentation_has_the_table() -> None:
    assert table_text() in DOCS.read_text(encoding="utf-8"), f"put this table into {DOCS.name}:\n{table_text()}"
