"""The formats torch and onnx: the model is traced, so that it can be loaded without the user's code."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline.config import Config
from paceline.errors import MissingExtra
from paceline.tools.export.task import (
    BATCH_SIZES,
    ExportTask,
    explained,
    inputs_of,
    tensors_in,
    with_normalized_images,
)

MAX_BYTES_IN_ONE_FILE = 1 << 30  # of weights; an ONNX file is limited to twice as much


def write_torch(task: ExportTask) -> str:
    """Write `model.pt2`, a program of torch.export."""
    path = task.folder / "model.pt2"
    program, _, sizes = _trace(task)
    with _quiet():
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    task.compare(loaded, sizes)
    return 'import torch\nmodel = torch.export.load("model.pt2").module()\noutput = model(...)  # the inputs above'


def write_onnx(task: ExportTask) -> str:
    """Write `model.onnx`, and compare it in onnxruntime."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise MissingExtra(package, "onnx", "format=onnx")
    path = task.folder / "model.onnx"
    program, shapes, sizes = _trace(task)
    task.on_progress("converting to ONNX")
    size = sum(tensor.nbytes for tensor in tensors_in(task.run.model.state_dict()))
    with _quiet(), explained("torch.onnx.export cannot convert this model"):
        torch.onnx.export(
            program, f=path, dynamo=True, dynamic_shapes=shapes, output_names=_names_of(task.expected(task.batch)),
            external_data=size > MAX_BYTES_IN_ONE_FILE, verbose=False,
        )  # fmt: skip
    with explained("onnxruntime cannot run this model"):
        session = _in_onnxruntime(path)
    task.compare(session, sizes)
    return (
        'import onnxruntime\nsession = onnxruntime.InferenceSession("model.onnx")\n'
        "outputs = session.run(None, {...})  # arrays, by the names of the inputs above"
    )


def _trace(task: ExportTask) -> tuple[torch.export.ExportedProgram, Any, tuple[int, ...]]:
    """The model as a program, its dynamic shapes, and which of BATCH_SIZES it accepts."""
    model = _with_normalization(task.run.load_model(), task.run.config)
    inputs, named = inputs_of(task.batch)
    task.expected(task.batch)  # an error here is not caused by tracing
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tensors_in([*inputs, *named.values()]):
        if tensor.ndim and len(tensor) == BATCH_SIZES[0]:
            shapes[tensor] = {0: torch.export.Dim("batch")}
    task.on_progress("tracing the model")
    sizes: tuple[int, ...] = BATCH_SIZES
    with torch.no_grad(), _quiet():
        try:
            dynamic = shapes.dynamic_shapes(model, inputs, named)  # type: ignore[no-untyped-call]
            program = torch.export.export(model, inputs, named, dynamic_shapes=dynamic)
        except Exception:  # noqa: BLE001 - an error that is not about the batch size is raised again below
            dynamic, sizes = None, BATCH_SIZES[:1]
            with explained("torch.export cannot trace this model"):
                program = torch.export.export(model, inputs, named)
    _describe_inputs(task, program, sizes)
    return program, dynamic, sizes


def _with_normalization(model: torch.nn.Module, config: Config) -> torch.nn.Module:
    """The model, with normalisation of images included if the run normalises them before calling it."""

    def normalize(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if named:
            return inputs, with_normalized_images(named, config)
        return with_normalized_images((*inputs, None), config)[:-1], named

    if config.augment is not None:  # a hook, because a wrapper would lose the names of the inputs
        model.register_forward_pre_hook(normalize, with_kwargs=True)
    return model


def _describe_inputs(task: ExportTask, program: torch.export.ExportedProgram, sizes: tuple[int, ...]) -> None:
    """Note names, types and shapes of the inputs for the card."""
    inputs, named = inputs_of(task.batch)
    batch = "batch" if sizes == BATCH_SIZES else str(BATCH_SIZES[0])
    for name, tensor in zip(program.graph_signature.user_inputs, tensors_in([*inputs, *named.values()]), strict=False):
        shape = ", ".join([batch, *map(str, tensor.shape[1:])] if tensor.ndim else [])
        task.notes.append(f"Input `{name}`: {str(tensor.dtype).removeprefix('torch.')}, shape ({shape}).")
    if sizes != BATCH_SIZES:
        task.notes.append(f"The batch size must be {BATCH_SIZES[0]}: the model has a fixed batch size.")
    if task.run.config.augment is not None:
        task.notes.append("The model normalises images itself: pass them as the data set of the run returns them.")


def _in_onnxruntime(path: Path) -> Callable[..., Any]:
    """A function that runs the model of a file, with tensors as inputs and outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def call(*inputs: Any, **named: Any) -> Any:
        arrays = [tensor.numpy() for tensor in tensors_in([*inputs, *named.values()])]
        return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]

    return call


def _names_of(outputs: Any) -> list[str]:
    """A name for each tensor of the outputs: the keys of a dict, otherwise numbered names."""
    if isinstance(outputs, Mapping) and len(outputs) == len(tensors_in(outputs)):
        return list(outputs)
    count = len(tensors_in(outputs))
    return ["output"] if count == 1 else [f"output_{place}" for place in range(count)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings and messages of torch about its own code; the exported model is compared anyway."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
