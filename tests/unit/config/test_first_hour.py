"""The mistakes of a first hour that are found before a process starts; the others are in `tests/multi`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.configs import MANAGED, problems

HERE = re.escape(__file__)
TABLE = pd.DataFrame({"x": [1.0], "y": [0]})


def of_table(df: Any, size: int = 3) -> list[Any]:
    return []


def of_root(root: str, *, split: str) -> list[Any]:
    return []


def without_arguments() -> list[Any]:
    return []


class Net(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()


ADAM = torch.optim.Adam([torch.zeros(1)], lr=0.5)
GIVE_TABLE = "give df, a DataFrame or the path of a .csv or .parquet file"

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a model": (
        {"model_fn": nn.Linear(2, 1)},
        "model_fn=<Linear> is a model; give a function that returns it, such as model_fn=lambda: model",
    ),
    "a class without its arguments": (
        {"model_fn": Net},
        rf'model_fn={__name__}:Net \({HERE}:\d+\) needs width; give model_args={{"width": …}}',
    ),
    "a data set": (
        {"dataset_fn": TensorDataset(torch.ones(2, 1))},
        "dataset_fn=<TensorDataset> is a data set; give a function that returns it, such as dataset_fn=lambda: dataset",
    ),
    "a loader": (
        {"dataset_fn": DataLoader(TensorDataset(torch.ones(2, 1)))},
        "dataset_fn=<DataLoader> makes batches, which Paceline does; give a function that returns its data set",
    ),
    "the value of a loss": (
        {"loss_fn": torch.ones(1)},
        "loss_fn=<Tensor> is a value; give the function that computes it, without calling it",
    ),
    "an optimizer": (
        {"optimizer": ADAM},
        'optimizer=<Adam> has the parameters of a model outside the run; write optimizer={"name": "adam", "lr": 0.5}, '
        "or optimizer_fn=lambda model: Adam(model.parameters())",
    ),
    "a class of optimizers": (
        {"optimizer": torch.optim.SGD},
        'optimizer=<SGD> is a class; write optimizer="sgd", or optimizer_fn=lambda model: SGD(model.parameters())',
    ),
    "an optimizer as optimizer_fn": (
        {"optimizer_fn": ADAM},
        "optimizer_fn=<Adam> is an optimizer; give a function that returns it: lambda model: Adam(model.parameters())",
    ),
    "a class as optimizer_fn": (
        {"optimizer_fn": torch.optim.SGD},
        "optimizer_fn=torch.optim.sgd:SGD takes parameters, not the model; give a function such as lambda model: "
        "SGD(model.parameters())",
    ),
    "a class as loss": (
        {"loss_fn": nn.CrossEntropyLoss},
        "loss_fn=torch.nn.modules.loss:CrossEntropyLoss is a class; give an object of it: loss_fn=CrossEntropyLoss()",
    ),
    "no table": (
        {"dataset_fn": of_table},
        rf"dataset_fn={__name__}:of_table \({HERE}:\d+\) needs df; {GIVE_TABLE}",
    ),
    "no arguments of the data set": (
        {"dataset_fn": of_root},
        rf"dataset_fn={__name__}:of_root \({HERE}:\d+\) needs root, split; {GIVE_TABLE} or "
        'dataset_args={"root": …, "split": …}',
    ),
    "no argument besides the table": (
        {"dataset_fn": of_root, "df": TABLE},
        rf'dataset_fn={__name__}:of_root \({HERE}:\d+\) needs split; give dataset_args={{"split": …}}',
    ),
    "a table for a function without arguments": (
        {"dataset_fn": without_arguments, "df": TABLE},
        rf"df is given, but dataset_fn={__name__}:without_arguments \({HERE}:\d+\) takes \(\) -> .*; give it a "
        "parameter for the table",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence_with_the_fix(case: str) -> None:
    keys, sentence = MISTAKES[case]
    [problem] = problems({**MANAGED, **keys})
    is_pattern = HERE in sentence
    assert re.fullmatch(sentence.replace("{{", "{") if is_pattern else re.escape(sentence), problem)


def test_the_fix_is_written_as_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "lab_first_hour.py").write_text("from torch import nn\nmodel = nn.Linear(2, 1)\ndef make(width): ...\n")
    keys = {"dataset_fn": "builtins:list", "loss_fn": "torch.nn:MSELoss"}
    assert problems({**keys, "model_fn": "lab_first_hour:model"}, tmp_path) == [
        "model_fn=<Linear> is a model; give a function that returns it, such as def build(): return model",
        "loss_fn=torch.nn.modules.loss:MSELoss is a class; write loss_fn: mse_loss",
    ]
    made = problems({**keys, "model_fn": "lab_first_hour:make", "loss_fn": "mse_loss"}, tmp_path)
    assert made == [
        f"model_fn=lab_first_hour:make ({tmp_path / 'lab_first_hour.py'}:3) needs width; give model_args: {{width: …}}"
    ]
