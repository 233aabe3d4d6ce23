"""What the traceback of an error shows about the call that failed: the tensors of torch's function or layer.

Nothing is computed before an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.loss import _Loss
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.losses import IGNORED
from paceline.user_code import FRAME

Shape = tuple[int, ...]
MODEL, DATA = "model_fn", "dataset_fn"  # the functions that are to blame if the user's code is not in the traceback


class TensorFacts(NamedTuple):
    """What a message needs to know about a tensor."""

    shape: Shape
    dtype: str
    low: int | None = None  # of whole numbers
    high: int | None = None


@dataclass(frozen=True)
class Facts:
    """The call of torch that failed: a loss with an output and a target, or a layer with an input."""

    function: str = ""  # of torch.nn.functional, if one was called
    given: TensorFacts | None = None  # the input of the layer, or the output of the model for a loss
    target: TensorFacts | None = None
    layer: str = ""  # as named in messages
    weights: str = ""  # the dtype of the layer's weights
    takes: Mapping[str, int] | None = None  # the layer's in_features, in_channels or num_embeddings
    text: str = ""  # of the samples, if they hold text
    is_none: bool = False  # whether None was passed in place of the input
    is_in_data: bool = False  # whether the data set or its function was called
    is_in_collate: bool = False  # whether samples were being made a batch
    is_in_table: bool = False  # whether pandas raised it
    has_table: bool = True  # whether the run has a table (`df`); otherwise pandas holds something else
    loss_class: str = ""  # the class of torch's losses that was called in place of an instance
    model: str = ""  # the class of the outermost module in the traceback
    is_in_forward: bool = False  # whether a loss was called within the forward of a module
    batch: Any = None  # that the model was called with, by Paceline


class Diagnosis(NamedTuple):
    """What is wrong and how to correct it, and the function to look at."""

    sentence: str
    blamed: str  # a key of the config


def facts_of(error: BaseException) -> Facts:
    """What the traceback of an error knows about the call of torch that failed."""
    root: torch.nn.Module | None = None
    facts, trace, batch, modules = Facts(), error.__traceback__, None, list[str]()
    loss_class = ""
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        module, name = frame.f_locals.get("self"), frame.f_globals.get("__name__", "")
        modules.append(name)
        if isinstance(module, _Loss) and frame.f_code.co_name == "__init__":
            loss_class = type(module).__name__
        if isinstance(module, torch.nn.Module) and not isinstance(module, DistributedDataParallel):
            root = root or module
            if name.startswith("torch.nn.modules") and "input" in frame.f_locals:
                facts = _of_layer(module, root, frame)
        elif name == "torch.nn.functional" and "input" in frame.f_locals:
            facts = replace(_of_function(frame, facts), is_in_forward=root is not None and not _is_loss(root))
        elif frame.f_code.co_name == "run_model" and name.startswith("paceline."):
            batch = frame.f_locals.get("batch")
    text = str(error)
    files = [match[1] for match in FRAME.finditer(text)]  # of a DataLoader worker, whose text has its traceback
    return replace(
        facts,
        batch=batch,
        loss_class=loss_class,
        model=type(root).__name__ if root is not None else "",
        is_in_data=any(name.startswith("paceline.data.") for name in modules) or "in DataLoader worker process" in text,
        is_in_collate="torch.utils.data._utils.collate" in modules or "_utils/collate.py" in text,
        is_in_table="/pandas/" in files[-1] if files else bool(modules) and modules[-1].startswith("pandas."),
    )


def _is_loss(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.loss")


def _of_layer(layer: torch.nn.Module, root: torch.nn.Module, frame: FrameType) -> Facts:
    given = frame.f_locals["input"]
    if "target" in frame.f_locals:  # a loss
        target = _tensor_facts(frame.f_locals["target"])
        return Facts(given=_tensor_facts(given), target=target, text=_text_in(given), is_none=given is None)
    path = next((path for path, each in root.named_modules() if each is layer), "")
    label = f"layer {path!r} ({type(layer).__name__})" if path else f"the model ({type(layer).__name__})"
    weights = next((str(p.dtype).removeprefix("torch.") for p in layer.parameters() if p.is_floating_point()), "")
    takes = {name: getattr(layer, name, None) for name in ("in_features", "in_channels", "num_embeddings")}
    known = {name: value for name, value in takes.items() if isinstance(value, int)}
    return Facts(
        given=_tensor_facts(given), layer=label, weights=weights, takes=known, text=_text_in(given),
        is_none=given is None,
    )  # fmt: skip


def _of_function(frame: FrameType, outer: Facts) -> Facts:
    """The facts of a function of torch.nn.functional; those of the layer that has called it, if it is one."""
    given, name = frame.f_locals["input"], frame.f_code.co_name
    if "target" not in frame.f_locals:
        if outer.layer:
            return outer
        return Facts(function=name, given=_tensor_facts(given), text=_text_in(given), is_none=given is None)
    target = frame.f_locals["target"]
    text = _text_in(target) or _text_in(given)
    given_facts, target_facts = _tensor_facts(given), _tensor_facts(target)
    return Facts(function=name, given=given_facts, target=target_facts, text=text, is_none=given is None)


def _tensor_facts(value: Any) -> TensorFacts | None:
    if not isinstance(value, torch.Tensor):
        return None
    low = high = None
    if not value.is_floating_point() and not value.is_complex():
        with suppress(
            RuntimeError
        ):  # a GPU whose kernel has failed can compute nothing more; nor a tensor without size
            counted = value[value != IGNORED]
            low, high = int(counted.min()), int(counted.max())
    return TensorFacts(tuple(value.shape), str(value.dtype).removeprefix("torch."), low, high)


def _text_in(value: Any) -> str:
    """The first text of a batch of texts, for messages."""
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return repr(value) if isinstance(value, str) else ""
