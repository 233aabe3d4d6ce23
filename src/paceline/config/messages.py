"""Pydantic's validation errors as sentences of the form `<key>=<value> <problem>; <fix>`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.answers import advice_on_value, answers_to, shortened
from paceline.config.descriptions import section_of
from paceline.config.keys import FUNCTION_KEYS
from paceline.config.schema import Config
from paceline.config.sections import Section
from paceline.config.written import OPEN, Origin, written

_MADE_BY = {  # the key to use for an object, where a section of settings is expected
    "optimizer": "write optimizer_fn, a function of the model that returns it",
    "schedule": "write scheduler_fn, a function of the optimizer that returns it",
}


def problems_of(error: ValidationError, given: Mapping[str, Any], origin: Origin | None = None) -> list[str]:
    """One sentence for each mistake that pydantic found in the given config, with words for where it was typed."""
    origin, details = origin or Origin(), error.errors(include_url=False)
    unknown = {_path(detail): detail["input"] for detail in details if detail["type"] == "extra_forbidden"}
    answers = answers_to(unknown, given, origin)
    return list(dict.fromkeys(answers.get(_path(detail)) or _describe(detail, given, origin) for detail in details))


def _path(detail: ErrorDetails) -> tuple[str, ...]:
    return tuple(str(part) for part in detail["loc"])


def _describe(detail: ErrorDetails, given: Mapping[str, Any], origin: Origin) -> str:
    if detail["type"] == "extra_forbidden":
        return f"{'.'.join(_path(detail))} is not a known key; {_hint([*_path(detail)])}"
    # For a union, the location also names the branch that failed, such as "list[str]"; users know only the key.
    path = [part for part in detail["loc"] if isinstance(part, str) and not re.search(r"[\[(-]", part)]
    path = [part for part in path if part not in ("str", "callable", "bool")]
    key, value = ".".join(path), shortened(detail["input"])
    if advice := advice_on_value(key, detail["input"], given, origin):
        return f"{key}={value} {advice}"
    if key == "optimizer" and is_optimizer(detail["input"]):
        return _instead_of_optimizer(detail["input"], origin)
    if key in _MADE_BY:
        return f"{key}={value} is neither a name nor a section; to use an object, {_MADE_BY[key]}"
    if key == "optimizer_fn" and is_optimizer(detail["input"]):
        kind = type(detail["input"]).__name__
        return f"{key}=<{kind}> is an optimizer; give a function that returns it: lambda model: {_made_by(kind)}"
    if path[0] in FUNCTION_KEYS and detail["type"] != "value_error":
        return _instead_of_function(key, detail["input"])
    if detail["type"] == "model_type":
        return f"{key}={value} is not a section of settings; its keys are {', '.join(_known_keys(path))}"
    if detail["type"] == "list_type":
        return f"{key}={value} is not a list; write {written({key: [OPEN]}, origin.of(key))}"
    message = detail["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    message = message.replace("Input should", "must")
    return f"{key}={value} {message[0].lower()}{message[1:]}"


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer of torch, or such a class; without importing torch."""
    kind = value if isinstance(value, type) else type(value)
    return any(each.__name__ == "Optimizer" and each.__module__.startswith("torch.") for each in kind.__mro__)


def _instead_of_optimizer(value: Any, origin: Origin) -> str:
    """The sentence for an optimizer, or a class of them, in place of a name."""
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    ways = [f"optimizer_fn=lambda model: {_made_by(kind.__name__)}"]
    if kind.__module__.startswith("torch.optim."):
        name, lr = kind.__name__.lower(), None if is_class else value.param_groups[0].get("lr")
        section = {"name": name, "lr": lr} if isinstance(lr, float) else name
        ways = [written({"optimizer": section}, origin.of("optimizer")), *ways]
    wrong = "is a class" if is_class else "has the parameters of a model outside the run"
    return f"optimizer=<{kind.__name__}> {wrong}; write {', or '.join(ways)}"


def _instead_of_function(key: str, value: Any) -> str:
    """The sentence for an object in place of a function."""
    named = f"{key}=<{type(value).__name__}>"
    if type(value).__name__ == "Tensor":
        return f"{named} is a value; give the function that computes it, without calling it"
    if key in ("dataset_fn", "val_dataset_fn") and not isinstance(value, str):
        if hasattr(value, "batch_sampler"):  # a DataLoader
            return f"{named} makes batches, which Paceline does; give a function that returns its data set"
        if hasattr(value, "__getitem__") or hasattr(value, "__iter__"):
            return f"{named} is a data set; give a function that returns it, such as {key}=lambda: dataset"
    return f'{key}={shortened(value)} is not a function; pass a function, or write "module:name" in a config'


def _made_by(optimizer: str) -> str:
    return f"{optimizer}(model.parameters())"


def _hint(path: list[str]) -> str:
    """A suggestion for an unknown key: a key with a similar spelling, or the same word in a section."""
    *sections, last = path
    known = _known_keys(sections)
    near = difflib.get_close_matches(last, known, n=1, cutoff=0.75)
    near = near or [f"{key}.{last}" for key in known if not sections and last in _known_keys([key])]
    meant = " or ".join(".".join([*sections, key]) for key in near)
    if meant or sections:
        return f"did you mean {meant}?" if meant else f"known keys: {', '.join(known)}"
    return "arguments of model_fn belong in model_args, those of dataset_fn in dataset_args"


def _known_keys(sections: list[str]) -> list[str]:
    """The keys of a section, given by its path; empty if it is not a section."""
    model: type[Section] | None = Config
    for name in sections:
        model = section_of(model.model_fields[name]) if model is not None else None
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]
