"""Errors of a newcomer's functions and samples, raised by real libraries, and the sentences for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from paceline.config import build
from paceline.engine.call_facts import Facts
from paceline.engine.diagnosis import diagnosis_of, explained
from paceline.engine.objective import run_model
from paceline.worker.own_run import OwnRun
from paceline.worker.rank_run import RankRun
from support.configs import MANAGED

TABLE = pd.DataFrame({"age": [1.0], "city": ["Rome"]})


class Photo:
    """An object that no batch can be made of."""


class NoForward(nn.Module):
    def foward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WithoutReturn(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        x.relu()


class NoParent(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(2, 1)


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask


def missing_module() -> Any:
    import sklearn_or_so.linear

    return sklearn_or_so.linear


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "a column": (lambda: TABLE["agee"], "the table has no column agee; did you mean age?"),
    "columns": (lambda: TABLE[["x", "y"]], "the table has no column x, y; its columns are age, city"),
    "a row of a part of the table": (
        lambda: TABLE["age"][5],
        "the table has no row with the label 5; .iloc[index] selects rows by position",
    ),
    "no sample": (
        lambda: default_collate([None, None]),
        "the data set returned None for a sample; return the sample, such as (x, y)",
    ),
    "objects": (
        lambda: default_collate([Photo()]),
        f"a sample contains a {__name__}.Photo, but a batch is made of tensors, NumPy arrays and numbers; convert it "
        "in the data set, for example with torch.as_tensor(x), or give collate_fn",
    ),
    "unequal samples": (
        lambda: default_collate([torch.ones(3), torch.ones(4)]),
        "samples of different shapes, [3] and [4], do not fit in one batch; make them equal in the data set, or give "
        "collate_fn, which pads them",
    ),
    "no __getitem__": (
        lambda: Dataset[Any]()[0],
        "the data set has no __getitem__; define __getitem__(self, index), which returns a sample",
    ),
    "no forward": (
        lambda: NoForward()(torch.ones(2)),
        "the model has no method forward; define forward(self, x), which returns the output",
    ),
    "forward without return": (
        lambda: functional.cross_entropy(WithoutReturn()(torch.ones(2, 2)), torch.ones(2)),
        "the model returned None: its forward has no return; end it with return and the output",
    ),
    "forward without return, another loss": (
        lambda: nn.MSELoss()(WithoutReturn()(torch.ones(2, 2)), torch.ones(2)),
        "the model returned None: its forward has no return; end it with return and the output",
    ),
    "part without return": (
        lambda: nn.Sequential(WithoutReturn(), nn.Linear(2, 1))(torch.ones(2, 2)),
        "layer '1' (Linear) gets None; check that the forward before it returns its output",
    ),
    "no parent": (
        NoParent,
        "the __init__ of the model assigns a layer first; begin it with super().__init__()",
    ),
    "other keys": (
        lambda: run_model(nn.Linear(2, 1), {"pixels": torch.ones(2), "labels": 1}),
        "Linear.forward is called with pixels, the keys of a sample except labels (Linear.forward() got an unexpected "
        "keyword argument 'pixels'); name the keys as the parameters of forward, and the target labels",
    ),
    "fewer inputs": (
        lambda: run_model(TwoInputs(), (torch.ones(2), torch.ones(2))),
        "TwoInputs.forward is called with 1 input, the parts of a sample except the last one, its target "
        "(TwoInputs.forward() missing 1 required positional argument: 'mask'); give forward the same number of "
        "parameters, or change the samples",
    ),
    "swapped": (
        lambda: functional.cross_entropy(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)),
        "cross_entropy gets the targets first; call it with the output first, then the targets",
    ),
    "indices": (
        lambda: nn.Sequential(nn.Embedding(5, 2))(torch.ones(4)),
        "layer '0' (Embedding) gets float32, but takes indices of int64; convert the samples in the data set: x.long()",
    ),
    "no probabilities": (
        lambda: nn.BCELoss()(torch.full((2,), 1.5), torch.ones(2)),
        "binary_cross_entropy takes probabilities, but outputs of the model are not between 0 and 1; use "
        "binary_cross_entropy_with_logits, or end the model with nn.Sigmoid()",
    ),
    "a value without a name": (
        lambda: RankRun.log(object.__new__(RankRun), 1.0),  # type: ignore[misc]
        "run.log takes values by name; write run.log(loss=loss)",
    ),
    "no optimizer": (
        lambda: OwnRun.step(object.__new__(OwnRun)),  # type: ignore[call-arg]
        "run.step needs the optimizer; write run.step(optimizer)",
    ),
    "DDP's wrapper": (
        lambda: nn.Linear(2, 1).module,
        "the model is your own module, without DDP's wrapper; write model in place of model.module",
    ),
    "a missing module": (
        missing_module,
        "there is no module sklearn_or_so; run: pip install sklearn_or_so, or correct the name if it is a file of "
        "yours",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_of_a_newcomer_is_one_sentence_with_the_fix_and_the_place(case: str) -> None:
    config = build({**MANAGED, "df": TABLE})
    call, sentence = CASES[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any class
        call()
    assert re.fullmatch(rf"{re.escape(sentence)} \({re.escape(__file__)}:\d+\)", explained(caught.value, config) or "")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "remove .cuda() and .to('cuda'): Paceline moves"),
        (RuntimeError("Found no NVIDIA driver on your system. Please check"), "remove .cuda() and .to('cuda')"),
        (
            RuntimeError(
                "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors "
                "on cuda:0 (when checking argument in method wrapper_CUDA_addmm)"
            ),
            "are on different devices (mat1 is on cpu, different from other tensors on cuda:0); create further tensors",
        ),
        (
            RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            ),
            "are on different devices (at least two devices, cuda:0 and cpu); create further tensors",
        ),
    ],
)
def test_errors_about_devices_have_the_fix(error: Exception, words: str) -> None:
    assert words in (explained(error, build({**MANAGED})) or "")


def test_a_column_that_a_worker_has_not_found_is_named() -> None:
    kind = type("KeyErrorMessage", (KeyError,), {"__str__": lambda self: self.args[0]})  # as torch shows it
    error = kind(
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        "  File \"/lab/data.py\", line 8, in __getitem__\n    return self.df['agee'][index]\n"
        '  File "/env/lib/python3.12/site-packages/pandas/core/indexes/base.py", line 9, in get_loc\n'
        "KeyError: 'agee'"
    )
    sentence = "the table has no column agee; did you mean age? (/lab/data.py:8)"
    assert explained(error, build({**MANAGED, "df": TABLE})) == sentence


def test_a_missing_key_of_the_users_own_dict_stays_as_it_is() -> None:
    with pytest.raises(KeyError) as caught:
        TABLE["city"].map(lambda name: {"Paris": 0}[name])
    assert explained(caught.value, build({**MANAGED, "df": TABLE})) is None


@pytest.mark.parametrize(
    "error",
    [
        KeyError("age"),
        TypeError("Net.forward() missing 1 required positional argument: 'x'"),
        RuntimeError("stack expects each tensor to be equal size, but got [4] at entry 0 and [5] at entry 1"),
    ],
)
def test_the_same_errors_in_code_of_the_user_stay_as_they_are(error: Exception) -> None:
    assert explained(error, build({**MANAGED, "df": TABLE})) is None


class Outer(nn.Module):
    """A model whose forward contains a mistake in code of its own."""

    def __init__(self, mistake: Any) -> None:
        super().__init__()
        self.mistake = mistake

    def forward(self, x: torch.Tensor) -> Any:
        return self.mistake(x)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda x: nn.functional.relu({}.get("hidden")), None),
        (lambda x: Photo().module, None),
        (
            lambda x: nn.CrossEntropyLoss(x, x),
            "CrossEntropyLoss is a class; create the loss first: CrossEntropyLoss()(",
        ),
        (lambda x: 1 if x else 0, None),
        (
            lambda x: nn.functional.cross_entropy(x, torch.tensor([7, 7])),
            "cross_entropy in the forward of Outer gets target 7, but its input of shape (2, 3) has 3 classes; ",
        ),
        (
            lambda x: nn.Embedding(4, 2)(torch.tensor([-3, 9])),
            "the index -3, but has 4 rows, numbered from 0 to 3; correct the samples",
        ),
        (lambda x: pd.DataFrame({"id": [1]}).loc[7], "an object of pandas has no row with the label 7; "),
    ],
    ids=[
        "None within forward",
        "own attribute",
        "loss class",
        "own condition",
        "auxiliary loss",
        "negative index",
        "own lookup table",
    ],
)
def test_mistakes_within_the_users_code_are_not_blamed_on_other_code(mistake: Any, sentence: str | None) -> None:
    config, model = build({**MANAGED}), Outer(mistake)
    with pytest.raises((KeyError, TypeError, AttributeError, IndexError, RuntimeError)) as caught:
        model(torch.zeros(2, 3))
    found = explained(caught.value, config)
    assert found is None if sentence is None else sentence in (found or "")


def test_a_call_of_another_module_is_not_taken_for_that_of_the_model() -> None:
    text = "TypeError: Inner.forward() missing 1 required positional argument: 'mask'"
    batch = (torch.zeros(2), torch.zeros(2))
    assert diagnosis_of(text, Facts(batch=batch, model="Outer")) is None
    assert diagnosis_of(text, Facts(batch=batch, model="Inner")) is not None
