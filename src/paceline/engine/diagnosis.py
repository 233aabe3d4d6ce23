"""Torch's errors about a batch that does not fit the model or the loss, in one sentence with the cause and the fix.

The facts are taken from the traceback (`call_facts.py`), so the same is found in the managed loop, in a step of the
user and in the user's own loop. `code_rules.py` has the rules for errors that are not about the values of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from paceline.data.sources import columns_of, text_columns
from paceline.engine import code_rules
from paceline.engine.call_facts import DATA, MODEL, Diagnosis, Facts, facts_of
from paceline.user_code import place_of, user_location

TEXT = re.compile(
    r"too many dimensions 'str'|could not convert string to float|numpy\.object_|invalid data type 'str'|"
    r"must be Tensor, not (tuple|list|str)|new\(\): .*'str'"
)
OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")
DTYPES = re.compile(
    r"(have|not) the same dtype|expected scalar type|Input type \(|mixed dtype|input dtype .* does not match weight"
)
TARGET_DTYPES = re.compile(
    r"result type \w+ can't be cast to the desired output type|expected target dtype|expected scalar type|"
    r"[Ii]ntegral inputs not supported|Expected floating point type for target"
)
TWO_DTYPES = re.compile(r"Found dtype (\w+) but expected (\w+)")  # raised by backward
SIZES = re.compile(
    r"match target batch_size|must be the same as input size|must match the size of tensor|multi-target not supported|"
    r"only batches of spatial targets|same (size|shape)|Dimension out of range|broadcast"
)
SHAPES = re.compile(
    r"shapes cannot be multiplied|size mismatch|to have \d+ channels|[Ee]xpected \dD|should contain \d+|"
    r"normalized_shape|must be equal to input_size|embedding dimension of|Kernel size can't be greater"
)
ASSERT = "device-side assert triggered"


def explained(error: BaseException, config: Any) -> str | None:
    """The sentence for an error of torch with the place in the user's code; None if it is not known."""
    text = f"{type(error).__name__}: {error}"
    found = diagnosis_of(text, replace(facts_of(error), has_table=config.df is not None))
    if found is None:
        return None
    sentence = found.sentence
    if TEXT.search(text) and (columns := text_columns(config.df)):
        sentence = f"{sentence}; df has text in {', '.join(columns)}"
    if code_rules.COLUMN.search(text) and (hint := code_rules.nearest_column(text, columns_of(config.df))):
        sentence = f"{sentence}; {hint}"
    place = user_location(error) or place_of(getattr(config, found.blamed))
    return f"{sentence} ({place})" if place is not None else sentence


def diagnosis_of(text: str, facts: Facts) -> Diagnosis | None:
    """The diagnosis of an error by its text and what is known of the call that raised it (pure)."""
    for pattern, rule in RULES:
        if re.search(pattern, text) and (found := rule(text, facts)) is not None:
            return found
    return None


# --- the rules ----------------------------------------------------------------------------------------------------


def _classes(text: str, facts: Facts) -> Diagnosis | None:
    given, target = facts.given, facts.target
    if given is None or target is None or target.low is None or target.high is None or not given.shape:
        return None
    count, low, high = given.shape[1 if len(given.shape) > 1 else 0], target.low, target.high
    found = OUT_OF_BOUNDS.search(text)
    assert found is not None
    if facts.is_in_forward:  # an auxiliary loss, or that of a model which computes its own
        return Diagnosis(
            f"{facts.function} in the forward of {facts.model} gets target {found[1]}, but its input of shape "
            f"{given.shape} has {count} classes; correct the targets, or give it more classes",
            MODEL,
        )
    outputs = f"the model's output of shape {given.shape} has {count} {'class' if count == 1 else 'classes'}"
    if int(found[1]) < 0:
        return Diagnosis(f"a target is {found[1]}, but classes are numbered from 0; correct the targets", DATA)
    if count == 1:
        return Diagnosis(
            f"a target is class {high}, but {outputs}; give the last layer {high + 1} outputs, or use "
            "binary_cross_entropy_with_logits with targets that are floats",
            MODEL,
        )
    more = f"give the last layer of the model {high + 1} outputs"
    starts_at_1 = low > 0 and high == count
    fix = f"subtract 1 from the targets if they are numbered from 1, else {more}" if starts_at_1 else more
    return Diagnosis(
        f"a target is class {high}, but {outputs}, numbered from 0 to {count - 1}; {fix}",
        DATA if starts_at_1 else MODEL,
    )


def _rows_of_embedding(text: str, facts: Facts) -> Diagnosis | None:
    rows = (facts.takes or {}).get("num_embeddings")
    if facts.given is None or facts.given.high is None or rows is None:
        return None
    is_negative = facts.given.low is not None and facts.given.low < 0
    index = facts.given.low if facts.given.low is not None and is_negative else facts.given.high
    fix = "correct the samples" if is_negative else f"give it num_embeddings={index + 1}, or correct the samples"
    return Diagnosis(
        f"{facts.layer} gets the index {index}, but has {rows} rows, numbered from 0 to {rows - 1}; {fix}", MODEL
    )


def _input_dtype(text: str, facts: Facts) -> Diagnosis | None:
    given = facts.given
    if given is None or facts.target is not None or not facts.weights or given.dtype == facts.weights:
        return None
    advice = "x.float()" + (" / 255 for images" if given.dtype == "uint8" else "")
    return Diagnosis(
        f"{facts.layer} gets {given.dtype}, but its weights are {facts.weights}; convert the samples in the data set: "
        f'{advice}, or .astype("float32") in NumPy and pandas',
        DATA,
    )


def _target_dtype(text: str, facts: Facts) -> Diagnosis | None:
    target, name = facts.target, facts.function
    if target is None or not name:
        return None
    takes_classes = name in ("cross_entropy", "nll_loss") and "floating point" not in text
    need, advice = ("class numbers of int64", "y.long()") if takes_classes else ("floats", "y.float()")
    return Diagnosis(
        f"{name} needs targets that are {need}, but they are {target.dtype}; convert them in the data set: {advice}",
        DATA,
    )


def _two_dtypes(text: str, facts: Facts) -> Diagnosis | None:
    found = TWO_DTYPES.search(text)
    assert found is not None
    return Diagnosis(
        f"the loss compares outputs and targets of different types ({found[2]} and {found[1]}); convert the targets in "
        "the data set: y.float()",
        DATA,
    )


def _sizes(text: str, facts: Facts) -> Diagnosis | None:
    given, target = facts.given, facts.target
    if given is None or target is None or given.shape == target.shape:
        return None
    blamed, advice = MODEL, "change the last layer of the model or the targets so that they agree"
    if target.shape == (*given.shape, 1) or (target.shape[1:] == (1,) and facts.function == "cross_entropy"):
        blamed, advice = DATA, "return targets without the last dimension: y.squeeze(-1)"
    elif given.shape == (*target.shape, 1):
        advice = "return model(x).squeeze(-1), or targets with a further dimension: y.unsqueeze(-1)"
    return Diagnosis(
        f"{facts.function or 'the loss'} gets an output of shape {given.shape} and targets of shape {target.shape}; "
        f"{advice}",
        blamed,
    )


def _shapes(text: str, facts: Facts) -> Diagnosis | None:
    if facts.given is None or not facts.layer or facts.target is not None:
        return None
    shape, takes, advice = facts.given.shape, facts.takes or {}, "change the layer, or the samples in the data set"
    if (features := takes.get("in_features")) is not None and shape:
        needs = f", but takes {features} features"
        is_flat = len(shape) > 2 and prod(shape[1:]) == features
        advice = "put nn.Flatten() in front of it" if is_flat else f"give it in_features={shape[-1]}, or other samples"
    elif (channels := takes.get("in_channels")) is not None and len(shape) > 1:
        needs = f", but takes {channels} channels"
        if shape[-1] == channels:
            advice = "return images with the channels first: x.permute(2, 0, 1)"
        elif len(shape) > 2:
            advice = f"give it in_channels={shape[1]}, or other samples"
        needs += f" and images of shape (batch, {channels}, height, width)" if len(shape) < 3 else ""
    else:
        needs = f", which does not fit ({text.partition(': ')[2].splitlines()[0].rstrip('.')})"
    return Diagnosis(f"{facts.layer} gets an input of shape {shape}{needs}; {advice}", MODEL)


def _text(text: str, facts: Facts) -> Diagnosis | None:
    if not facts.text and not facts.is_in_data:  # raised by other code of the user
        return None
    found = re.search(r"string to float: ('.*')", text)
    example = facts.text or (found[1] if found is not None else "")
    what = f"text ({example})" if example else "text"
    is_target = facts.target is None and bool(facts.text) and bool(facts.function)
    return Diagnosis(
        f"{'the targets are' if is_target else 'the samples contain'} {what}, and tensors hold numbers; convert the "
        'columns before: df["x"].astype("category").cat.codes for categories, pd.to_numeric for numbers',
        DATA,
    )


def _device_assert(text: str, facts: Facts) -> Diagnosis | None:
    return Diagnosis(
        "a kernel of the GPU found an index out of range, such as a target that is not one of the model's classes, or "
        "a token that the embedding does not have; run it once with device: cpu, which shows the index",
        DATA,
    )


RULES: tuple[tuple[re.Pattern[str] | str, Callable[[str, Facts], Diagnosis | None]], ...] = (
    (OUT_OF_BOUNDS, _classes),
    ("index out of range in self", _rows_of_embedding),
    (TEXT, _text),
    (TARGET_DTYPES, _target_dtype),
    (DTYPES, _input_dtype),
    (TWO_DTYPES, _two_dtypes),
    (SIZES, _sizes),
    (SHAPES, _shapes),
    (ASSERT, _device_assert),
    *code_rules.RULES,
)
