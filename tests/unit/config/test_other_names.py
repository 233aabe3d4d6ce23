"""Names of other libraries: what an unknown key is answered, and the table in docs/coming_from.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import Config, override
from paceline.config.other_names import TABLE
from paceline.errors import ConfigError
from paceline.trainer import build_config
from support.configs import MANAGED, problems

DOCS = Path(__file__).parents[3] / "docs" / "coming_from.md"
COLUMNS = ("Lightning", "transformers", "Accelerate", "torchrun, scripts", "Paceline")
ROWS = [row for rows in TABLE.values() for row in rows]


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (
            {"learning_rate": 0.01},
            'learning_rate=0.01 is called optimizer.lr in Paceline; write optimizer={"lr": 0.01}',
        ),
        ({"epochs": 4}, "epochs=4 is called num_epochs in Paceline; write num_epochs=4"),
        ({"fp16": True}, 'fp16=True is called precision in Paceline; write precision="fp16"'),
        ({"amp": False}, 'amp=False is called precision in Paceline; write precision="fp32"'),
        ({"dtype": torch.bfloat16}, 'dtype=torch.bfloat16 is called precision in Paceline; write precision="bf16"'),
        ({"precision": "16-mixed"}, "precision='16-mixed' has no meaning here; write precision=\"fp16\""),
        ({"max_steps": -1}, "max_steps=-1 has no meaning here; remove it, num_epochs ends the run"),
        ({"num_nodes": 2}, 'num_nodes=2 is called nodes in Paceline; write nodes=2, rendezvous="HOST:29400"'),
        ({"profiler": "simple"}, "profiler='simple' is not a key of Paceline; run paceline profile CONFIG"),
        ({"tokenizer": "bert"}, "tokenizer='bert' is not a key of Paceline; use it in dataset_fn or collate_fn"),
        (
            {"momentum": 0.9},
            'momentum=0.9 is called optimizer.momentum in Paceline; write optimizer={"name": "sgd", "momentum": 0.9}',
        ),
        (
            {"data": "x.csv"},
            "data='x.csv' is called df in Paceline; write df=\"x.csv\", the table that dataset_fn gets",
        ),
        (
            {"metric": "f1"},
            "metric='f1' is called metrics.f1 in Paceline; write metrics={\"f1\": …}, a function (output, target) that "
            "returns a mean",
        ),
        (
            {"optim": "adamw_torch"},
            'optim=\'adamw_torch\' is called optimizer.name in Paceline; write optimizer={"name": "adamw"}',
        ),
        (
            {"scheduler": "StepLR"},
            'scheduler=\'StepLR\' is called schedule.name in Paceline; write schedule={"name": "step", '
            '"every_epochs": 30, "factor": 0.1}',
        ),
        (
            {"val_check_interval": 0.5},
            'val_check_interval=0.5 is called evaluate.every_steps in Paceline; write evaluate={"every_steps": …}, '
            "a number of steps",
        ),
        (
            {"class_weights": [1, 2]},
            "class_weights=[1, 2] is called loss_fn in Paceline; write loss_fn=…, a function with weight=[1, 2] in its "
            "cross_entropy; or sample_weights, which draws samples more often",
        ),
        (
            {"max_epochs": -1},
            "max_epochs=-1 is called num_epochs in Paceline; write num_epochs=1000, max_steps=…, the run ends "
            "when the first limit is reached",
        ),
        (
            {"verbose": 1},
            "verbose=1 is not a key of Paceline; remove it, terminals show a live view and files get plain lines",
        ),
        (
            {"hparams": 3},
            "hparams=3 is called model_args in Paceline; write model_args=…, a section with the arguments of "
            "model_fn; there is dataset_args for those of dataset_fn",
        ),
        (
            {"accumulate_grad_batches": 4},
            "accumulate_grad_batches=4 is called lanes in Paceline; write lanes=4, times the number of processes, "
            "whose micro-batches lanes counts",
        ),
    ],
)
def test_a_key_of_another_library_is_answered_with_the_words_to_write(raw: dict[str, Any], answer: str) -> None:
    assert problems({**MANAGED, **raw}) == [answer]


def test_the_answer_has_the_words_for_the_place_where_the_key_was_typed(tmp_path: Path) -> None:
    raw: dict[str, Any] = {**MANAGED, "learning_rate": 0.1, "optimizer": {"name": "sgd"}, "clip_grad_norm": 1}
    overridden = override(raw, ["momentum=0.9", "early_stopping=true"])
    with pytest.raises(ConfigError) as caught:
        build_config(raw, tmp_path, overridden)
    assert caught.value.problems == [
        "learning_rate=0.1 is called optimizer.lr in Paceline; write optimizer: {name: sgd, lr: 0.1}",
        "clip_grad_norm=1 is called clip_norm in Paceline; write clip_norm: 1",
        "momentum=0.9 is called optimizer.momentum in Paceline; write optimizer.momentum=0.9",
        "early_stopping=True is called early_stop.patience in Paceline; write early_stop.patience=5",
    ]


def test_a_key_of_another_library_inside_a_section_is_answered() -> None:
    raw = {"checkpoint": {"save_total_limit": 2, "monitor": "accuracy"}, "optimizer": {"learning_rate": 0.1}}
    assert problems({**MANAGED, **raw}) == [
        "checkpoint.save_total_limit=2, checkpoint.monitor='accuracy' are called checkpoint.keep, "
        'checkpoint.best.metric in Paceline; write checkpoint={"keep": 2, '
        '"best": {"metric": "accuracy", "mode": "max"}}, '
        'metrics="accuracy", the number of the newest ones',
        'optimizer.learning_rate=0.1 is called optimizer.lr in Paceline; write optimizer={"lr": 0.1}',
    ]


def test_a_misspelled_value_is_answered_with_the_values_that_exist() -> None:
    [problem] = problems({**MANAGED, "schedule": "cosin"})
    assert problem.startswith("schedule.name='cosin' must be 'constant', 'linear', 'cosine'")


def test_an_object_as_a_value_is_not_repeated_as_words_to_write() -> None:
    [problem] = problems({**MANAGED, "model": object()})
    assert problem.endswith("is called model_fn in Paceline; write model_fn=…, a function that returns the model")


def test_a_key_without_a_value_is_removed() -> None:
    assert problems({**MANAGED, "gradient_clip_val": None}) == [
        "gradient_clip_val=None is called clip_norm in Paceline; remove it"
    ]


@pytest.mark.parametrize("name", ["image_size", "hidden_dim", "vocab_size"])
def test_a_name_that_is_spelled_otherwise_is_not_guessed(name: str) -> None:
    [problem] = problems({**MANAGED, name: 1})
    assert problem == (
        f"{name} is not a known key; arguments of model_fn belong in model_args, those of dataset_fn in dataset_args"
    )


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
            words = f"`{row.write}`".replace("VALUE", "…") if row.write else ""
            here = ", ".join(filter(None, (words, row.note.replace("VALUE", "…"))))
            names = map(names_cell, (row.lightning, row.transformers, row.accelerate, row.others))
            lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in (*names, here)) + "|")
    return "\n".join(lines)


def test_the_documentation_has_the_table() -> None:
    assert table_text() in DOCS.read_text(encoding="utf-8"), f"put this table into {DOCS.name}:\n{table_text()}"
