"""Torch's errors about a batch, raised by real layers and losses, and the sentences for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.config import build
from paceline.engine.diagnosis import Facts, diagnosis_of, explained
from support.configs import MANAGED

ONES = torch.ones(4, dtype=torch.long)
IMAGES = torch.zeros(4, 8, 6, 3)


def outputs(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, requires_grad=True)


class Nested(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), layer)

    def forward(self, x: Any) -> Any:
        return self.body(x)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "classes": (
        lambda: functional.cross_entropy(outputs(4, 3), ONES * 5),
        "a target is class 5, but the model's output of shape (4, 3) has 3 classes, numbered from 0 to 2; give the "
        "last layer of the model 6 outputs",
    ),
    "from 1 to N, some ignored": (
        lambda: nn.CrossEntropyLoss()(outputs(4, 3), torch.tensor([1, -100, 2, 3])),
        "a target is class 3, but the model's output of shape (4, 3) has 3 classes, numbered from 0 to 2; subtract 1 "
        "from the targets if they are numbered from 1, else give the last layer of the model 4 outputs",
    ),
    "negative": (
        lambda: functional.nll_loss(outputs(4, 3), ONES - 2),
        "a target is -1, but classes are numbered from 0; correct the targets",
    ),
    "index of an embedding": (
        lambda: Nested(nn.Embedding(5, 2))(ONES * 7),
        "layer 'body.1' (Embedding) gets the index 7, but has 5 rows, numbered from 0 to 4; give it num_embeddings=8, "
        "or correct the samples",
    ),
    "whole numbers": (
        lambda: Nested(nn.Linear(3, 2))(torch.ones(4, 3, dtype=torch.long)),
        "layer 'body.1' (Linear) gets int64, but its weights are float32; convert the samples in the data set: "
        'x.float(), or .astype("float32") in NumPy and pandas',
    ),
    "float64 images": (
        lambda: nn.Conv2d(3, 2, 3)(torch.zeros(4, 3, 8, 8).double()),
        "the model (Conv2d) gets float64, but its weights are float32; convert the samples in the data set: "
        'x.float(), or .astype("float32") in NumPy and pandas',
    ),
    "bytes": (
        lambda: nn.Conv2d(3, 2, 3)(torch.zeros(4, 3, 8, 8, dtype=torch.uint8)),
        "the model (Conv2d) gets uint8, but its weights are float32; convert the samples in the data set: "
        'x.float() / 255 for images, or .astype("float32") in NumPy and pandas',
    ),
    "float64 in a recurrent layer": (
        lambda: nn.LSTM(2, 2)(torch.ones(4, 3, 2).double()),
        "the model (LSTM) gets float64, but its weights are float32; convert the samples in the data set: "
        'x.float(), or .astype("float32") in NumPy and pandas',
    ),
    "integers for BCE": (
        lambda: functional.binary_cross_entropy_with_logits(outputs(4), ONES),
        "binary_cross_entropy_with_logits needs targets that are floats, but they are int64; convert them in the data "
        "set: y.float()",
    ),
    "floats for classes": (
        lambda: functional.cross_entropy(outputs(4, 3), ONES.float()),
        "cross_entropy needs targets that are class numbers of int64, but they are float32; convert them in the data "
        "set: y.long()",
    ),
    "one-hot integers": (
        lambda: functional.cross_entropy(outputs(4, 3), functional.one_hot(ONES, 3)),
        "cross_entropy needs targets that are floats, but they are int64; convert them in the data set: y.float()",
    ),
    "targets with a column": (
        lambda: functional.cross_entropy(outputs(4, 3), ONES[:, None]),
        "cross_entropy gets an output of shape (4, 3) and targets of shape (4, 1); return targets without the last "
        "dimension: y.squeeze(-1)",
    ),
    "an output with a column": (
        lambda: functional.binary_cross_entropy_with_logits(outputs(4, 1), ONES.float()),
        "binary_cross_entropy_with_logits gets an output of shape (4, 1) and targets of shape (4,); return "
        "model(x).squeeze(-1), or targets with a further dimension: y.unsqueeze(-1)",
    ),
    "another batch size": (
        lambda: functional.cross_entropy(outputs(8, 3), ONES),
        "cross_entropy gets an output of shape (8, 3) and targets of shape (4,); change the last layer of the model or "
        "the targets so that they agree",
    ),
    "channels last": (
        lambda: nn.Conv2d(3, 2, 3)(IMAGES),
        "the model (Conv2d) gets an input of shape (4, 8, 6, 3), but takes 3 channels; return images with the channels "
        "first: x.permute(2, 0, 1)",
    ),
    "grey images": (
        lambda: nn.Conv2d(3, 2, 3)(torch.zeros(4, 1, 8, 8)),
        "the model (Conv2d) gets an input of shape (4, 1, 8, 8), but takes 3 channels; give it in_channels=1, or other "
        "samples",
    ),
    "rows for a convolution": (
        lambda: nn.Conv2d(3, 2, 3)(torch.zeros(4, 75)),
        "the model (Conv2d) gets an input of shape (4, 75), but takes 3 channels and images of shape (batch, 3, "
        "height, width); change the layer, or the samples in the data set",
    ),
    "not flattened": (
        lambda: nn.Linear(144, 2)(IMAGES),
        "the model (Linear) gets an input of shape (4, 8, 6, 3), but takes 144 features; put nn.Flatten() "
        "in front of it",
    ),
    "normalised": (
        lambda: nn.LayerNorm(8)(torch.zeros(4, 3)),
        "the model (LayerNorm) gets an input of shape (4, 3), which does not fit (Given normalized_shape=[8], expected "
        "input with shape [*, 8], but got input of size[4, 3]); change the layer, or the samples in the data set",
    ),
    "text": (
        lambda: nn.Linear(2, 2)(("a", "b")),
        "the samples contain text ('a'), and tensors hold numbers; convert the columns before: "
        'df["x"].astype("category").cat.codes for categories, pd.to_numeric for numbers; df has text in city',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_torch_is_one_sentence_with_the_fix_and_the_place(case: str) -> None:
    config = build({**MANAGED, "df": pd.DataFrame({"city": ["Rome"], "age": [1.0]})})
    call, sentence = CASES[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any class
        call()
    assert re.fullmatch(rf"{re.escape(sentence)} \({re.escape(__file__)}:\d+\)", explained(caught.value, config) or "")


def test_the_function_to_look_at_is_named_where_no_code_of_the_user_has_run() -> None:
    config = build({**MANAGED})
    with pytest.raises(IndexError) as caught:
        functional.cross_entropy(outputs(4, 3), ONES * 5)
    inner = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    assert (explained(caught.value.with_traceback(inner), config) or "").endswith(
        f" ({config.function('model_fn').__code__.co_filename}:{config.function('model_fn').__code__.co_firstlineno})"
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("could not convert string to float: 'x'"),
        RuntimeError("not today"),
        IndexError("Target 3 is out of bounds."),
    ],
)
def test_errors_of_other_code_are_not_explained(error: Exception) -> None:
    assert explained(error, build({**MANAGED})) is None


def test_text_is_explained_where_the_data_set_or_its_worker_has_met_it() -> None:
    error = ValueError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        "  File \"/lab/data.py\", line 8, in __getitem__\nValueError: could not convert string to float: 'x'"
    )
    sentence = explained(error, build({**MANAGED})) or ""
    assert sentence.startswith("the samples contain text ('x'), and tensors hold numbers; ")
    assert sentence.endswith(" (/lab/data.py:8)")


def test_a_failed_assertion_of_a_gpu_names_its_likely_cause() -> None:
    found = diagnosis_of("AcceleratorError: CUDA error: device-side assert triggered\nCompile with", Facts())
    assert found is not None
    assert "a target that is not one of the model's classes" in found.sentence
    assert "device: cpu" in found.sentence
