"""Errors of the user's functions and samples that are not about the values of a batch, in one sentence with the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence

from paceline.engine.call_facts import DATA, MODEL, Diagnosis, Facts
from paceline.user_code import install_command

COLUMN = re.compile(r"KeyError: .*|None of \[Index|not in index")
UNKNOWN_TYPE = re.compile(r"default_collate: batch must contain .*; found <class '([\w.]+)'>")
UNEQUAL = re.compile(r"stack expects each tensor to be equal size, but got (\[[\d, ]*\]) at entry 0 and (\[[\d, ]*\])")
MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
FORWARD = re.compile(r"TypeError: (\w+)\.forward\(\) (?:got|takes|missing) ")
WRAPPED = re.compile(r"AttributeError: '(\w+)' object has no attribute 'module'")
ON_TWO_DEVICES = re.compile(r"Expected all tensors to be on the same device(?:, but (?:got|found) )?([^\n!(]*)")


def nearest_column(text: str, columns: Sequence[str]) -> str:
    """The column that a wrong name may mean, or all columns; nothing if the error names none."""
    wanted = _quoted(text)
    if not wanted or not columns:
        return ""
    near = [match for name in wanted for match in difflib.get_close_matches(name, columns, n=1)]
    return f"did you mean {near[0]}?" if near else f"its columns are {', '.join(columns)}"


def _quoted(text: str) -> list[str]:
    """The names in quotes in the last line of an error, before those that describe a type."""
    return re.findall(r"'([^']*)'", text.strip().splitlines()[-1].partition("dtype")[0])


def _column(text: str, facts: Facts) -> Diagnosis | None:
    if not facts.is_in_table:  # a dict of the user
        return None
    table = "the table" if facts.has_table else "an object of pandas"
    if found := re.search(r"KeyError: (\d+)$", text, re.MULTILINE):
        return Diagnosis(f"{table} has no row with the label {found[1]}; .iloc[index] selects rows by position", DATA)
    names = _quoted(text)
    what = "column" if facts.has_table else "column or label"
    return Diagnosis(f"{table} has no {what} {', '.join(names)}", DATA) if names else None


def _unknown_type(text: str, facts: Facts) -> Diagnosis | None:
    found = UNKNOWN_TYPE.search(text)
    assert found is not None
    if found[1] == "NoneType":
        return Diagnosis("the data set returned None for a sample; return the sample, such as (x, y)", DATA)
    example = "torchvision.transforms.functional.to_tensor(image)" if "PIL" in found[1] else "torch.as_tensor(x)"
    return Diagnosis(
        f"a sample contains a {found[1]}, but a batch is made of tensors, NumPy arrays and numbers; convert it in the "
        f"data set, for example with {example}, or give collate_fn",
        DATA,
    )


def _unequal(text: str, facts: Facts) -> Diagnosis | None:
    found = UNEQUAL.search(text)
    if found is None or not facts.is_in_collate:
        return None
    return Diagnosis(
        f"samples of different shapes, {found[1]} and {found[2]}, do not fit in one batch; make them equal in the data "
        "set, or give collate_fn, which pads them",
        DATA,
    )


def _without_return(text: str, facts: Facts) -> Diagnosis | None:
    if not facts.is_none or facts.is_in_forward:
        return None
    if facts.layer:
        return Diagnosis(f"{facts.layer} gets None; check that the forward before it returns its output", MODEL)
    return Diagnosis("the model returned None: its forward has no return; end it with return and the output", MODEL)


def _called_differently(text: str, facts: Facts) -> Diagnosis | None:
    """The model was called by Paceline with other arguments than its forward takes."""
    found = FORWARD.search(text)
    if found is None or facts.batch is None or found[1] != facts.model:  # a call of the user's own code
        return None
    if isinstance(facts.batch, Mapping):
        names = ", ".join(str(key) for key in facts.batch if key != "labels")
        how = f"{names}, the keys of a sample except labels"
        fix = "name the keys as the parameters of forward, and the target labels"
    else:
        count = len(facts.batch) - 1
        how = f"{count} {'input' if count == 1 else 'inputs'}, the parts of a sample except the last one, its target"
        fix = "give forward the same number of parameters, or change the samples"
    return Diagnosis(f"{found[1]}.forward is called with {how} ({text.partition(': ')[2]}); {fix}", MODEL)


def _swapped(text: str, facts: Facts) -> Diagnosis | None:
    given, target = facts.given, facts.target
    if given is None or target is None or not given.dtype.startswith("int") or not target.dtype.startswith("float"):
        return None
    return Diagnosis(f"{facts.function} gets the targets first; call it with the output first, then the targets", MODEL)


def _not_an_index(text: str, facts: Facts) -> Diagnosis | None:
    if not facts.layer or facts.given is None:
        return None
    return Diagnosis(
        f"{facts.layer} gets {facts.given.dtype}, but takes indices of int64; convert the samples in the data set: "
        "x.long()",
        DATA,
    )


def _missing_module(text: str, facts: Facts) -> Diagnosis | None:
    found = MISSING_MODULE.search(text)
    assert found is not None
    return Diagnosis(f"there is no module {found[1]}; {install_command(found[1])}", MODEL)


def _two_devices(text: str, facts: Facts) -> Diagnosis | None:
    found = ON_TWO_DEVICES.search(text)
    assert found is not None
    which = f" ({found[1].strip().rstrip(',')})" if found[1].strip() else ""
    return Diagnosis(
        f"the tensors of an operation are on different devices{which}; create further tensors on the device of the "
        "batch, such as torch.zeros(3, device=x.device), and keep constants of the model as buffers",
        MODEL,
    )


def _loss_class(text: str, facts: Facts) -> Diagnosis | None:
    if not facts.loss_class:
        return None
    name = facts.loss_class
    return Diagnosis(f"{name} is a class; create the loss first: {name}()(output, target)", MODEL)


def _without_wrapper(text: str, facts: Facts) -> Diagnosis | None:
    found = WRAPPED.search(text)
    if found is None or found[1] != facts.model:
        return None
    return Diagnosis("the model is your own module, without DDP's wrapper; write model in place of model.module", MODEL)


def _always(sentence: str, blamed: str = MODEL) -> Callable[[str, Facts], Diagnosis | None]:
    """A rule whose sentence needs no facts."""
    return lambda text, facts: Diagnosis(sentence, blamed)


RULES: tuple[tuple[re.Pattern[str] | str, Callable[[str, Facts], Diagnosis | None]], ...] = (
    (COLUMN, _column),
    (UNKNOWN_TYPE, _unknown_type),
    (UNEQUAL, _unequal),
    (
        "should implement __getitem__",
        _always("the data set has no __getitem__; define __getitem__(self, index), which returns a sample", DATA),
    ),
    (
        r'missing the required "forward" function',
        _always("the model has no method forward; define forward(self, x), which returns the output"),
    ),
    ("NoneType", _without_return),
    (FORWARD, _called_differently),
    (r"not implemented for '(Long|Int)'", _swapped),
    (r"Expected tensor for argument #1 'indices'", _not_an_index),
    (
        "all elements of input should be between 0 and 1",
        _always(
            "binary_cross_entropy takes probabilities, but outputs of the model are not between 0 and 1; use "
            "binary_cross_entropy_with_logits, or end the model with nn.Sigmoid()"
        ),
    ),
    (MISSING_MODULE, _missing_module),
    (
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available",
        _always(
            "the code uses a GPU, and torch finds none here; remove .cuda() and .to('cuda'): Paceline moves the model "
            "and the batches to the device of the run"
        ),
    ),
    (ON_TWO_DEVICES, _two_devices),
    (r"Run\.log\(\) takes 1 positional", _always("run.log takes values by name; write run.log(loss=loss)")),
    (r"Run\.step\(\) missing 1 required", _always("run.step needs the optimizer; write run.step(optimizer)")),
    (WRAPPED, _without_wrapper),
    ("Boolean value of Tensor with more than one value is ambiguous", _loss_class),
    (
        "initialize the default process group twice",
        _always("Paceline has created the process group; remove init_process_group and destroy_process_group"),
    ),
    (
        r"cannot assign (module|parameters?) before Module\.__init__\(\) call",
        _always("the __init__ of the model assigns a layer first; begin it with super().__init__()"),
    ),
)
