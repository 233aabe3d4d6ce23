"""A trained model in a form that other programs read: one function for each format.

What was written is loaded again and compared with the trained model before the folder gets its name.
"""

from __future__ import annotations

import io
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline import card
from paceline.config import Config
from paceline.data.augment import Augment
from paceline.data.feed import map_tensors, tensors_in, with_images
from paceline.data.loader import Dealt, KeyedDataset
from paceline.data.rows import rows_of
from paceline.data.sources import is_stream, make_datasets
from paceline.digest import sha256_of
from paceline.errors import ConfigError, DataError, MissingExtra, PacelineError
from paceline.functions import Missing
from paceline.randomness import seed_generators
from paceline.replica import make_model, run_model
from paceline.result import load_weights, save_weights
from paceline.run_folder import RunFolder, write_text
from paceline.world import World

if TYPE_CHECKING:
    from paceline.trained import TrainedRun

SIZES = (8, 3, 1)  # of the batches that are compared; the first is the one that is traced
TOLERANCE = 1e-4  # of the largest output: other kernels add in another order
IN_ONE_FILE = 1 << 30  # bytes of weights; ONNX cannot hold more than twice as much
HERE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")  # this process alone

Say = Callable[[str], None]
Call = Callable[..., Any]


@dataclass
class Task:
    """What is exported, where to, and what is found out on the way."""

    run: TrainedRun
    folder: Path
    data: Path | None
    say: Say
    notes: list[str] = field(default_factory=list)  # for the card: what its reader must know to use the model

    @cached_property
    def dataset(self) -> Any:
        """The validation data of the run, or its training data if it held out none; or that of `data`."""
        self.say("opening the data set")
        return open_dataset(self.run.config, self.data)

    @cached_property
    def batch(self) -> Any:
        """The first samples, as the data set gives them: images are not normalised yet."""
        config, places = self.run.config, [place % len(self.dataset) for place in range(SIZES[0])]
        rows = rows_of(self.dataset, config.data_on_device, HERE)
        if rows is not None:
            return rows.gather(rows.finder(self.dataset)(np.asarray(places)))
        return KeyedDataset(self.dataset, config.seed).whole(Dealt(0, places)).data


def export(
    run: TrainedRun, format: str, to: Path | str, data: Path | None = None, say: Say = lambda text: None
) -> Path:
    """Write a trained model into the new folder `to`, with a card and the config of the run; returns the folder.

    Models are traced and compared on samples of the run's validation data, or of `data`, a CSV or Parquet file.
    """
    if format not in FORMATS:
        raise ConfigError(f"format={format} is not known; use {', '.join(FORMATS)}")
    with published(Path(to)) as folder:
        task = Task(run, folder, data, say)
        usage = FORMATS[format](task)
        shutil.copyfile(RunFolder(run.run_dir).config, folder / "config.yaml")
        write_text(folder / "README.md", card.text(run, sha256_of(run.model.state_dict()), usage, task.notes))
    return Path(to)


# --- formats --------------------------------------------------------------------------------------------------------
# Each writes its files, compares, and returns how they are loaded again: Python code for the card.


def write_safetensors(task: Task) -> str:
    """The weights alone; they need the code of the model."""
    path = task.folder / "weights.safetensors"
    save_weights(task.run.model, path)
    fresh = make_model(task.run.config)
    load_weights(fresh, path)
    if sha256_of(fresh.state_dict()) != sha256_of(task.run.model.state_dict()):
        raise PacelineError("the weights that were read again differ from the model's; nothing was exported")
    task.notes.append("Read again into a new model: every weight is equal, bit by bit.")
    if reason := _why_no_samples(task):
        task.notes.append(f"Outputs were not compared: {reason}.")
    else:
        _compare(task, fresh.eval(), SIZES, is_normalized=True)
    _tell_of_images(task)
    return card.loading_weights(task.run.config)


def write_torch(task: Task) -> str:
    """A program of torch.export, which needs no code of the user's."""
    path = task.folder / "model.pt2"
    program, _, sizes = _trace(task)
    with _quiet():
        torch.export.save(program, path)
    _compare(task, torch.export.load(path).module(), sizes)
    return 'import torch\nmodel = torch.export.load("model.pt2").module()\noutput = model(...)  # the inputs above'


def write_onnx(task: Task) -> str:
    """An ONNX graph, compared in onnxruntime."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise MissingExtra(package, "onnx", "format=onnx")
    path = task.folder / "model.onnx"
    program, shapes, sizes = _trace(task)
    task.say("translating to ONNX")
    size = sum(tensor.nbytes for tensor in task.run.model.state_dict().values())
    with _quiet(), _explained("torch.onnx.export cannot translate this model"):
        torch.onnx.export(
            program, f=path, dynamo=True, dynamic_shapes=shapes, output_names=_names_of(_expected(task, task.batch)),
            external_data=size > IN_ONE_FILE, verbose=False,
        )  # fmt: skip
    _compare(task, _in_onnxruntime(path), sizes)
    return (
        'import onnxruntime\nsession = onnxruntime.InferenceSession("model.onnx")\n'
        "outputs = session.run(None, {...})  # arrays, by the names of the inputs above"
    )


def write_hf(task: Task) -> str:
    """What the model's own save_pretrained writes, with a tokenizer and the names of labels if there are any."""
    model = task.run.load_model().eval()
    pretrained: Any = model if hasattr(model, "save_pretrained") else getattr(model, "model", None)
    if not hasattr(pretrained, "save_pretrained"):
        raise ConfigError(
            f"format=hf needs a model with save_pretrained, or with one as its attribute model; model_fn returned a "
            f"{type(model).__name__}; use format safetensors, torch or onnx"
        )
    _name_labels(pretrained, task.dataset)
    pretrained.save_pretrained(task.folder)
    _save_tokenizer(task, model)
    kind: Any = type(pretrained)
    loaded = kind.from_pretrained(task.folder).eval()
    if pretrained is model:
        model = loaded
    else:
        model.model = loaded
        task.notes.append(f"This is the attribute `model` of what was trained, a {type(model).__name__}.")
    _compare(task, model, SIZES, is_normalized=True)
    _tell_of_images(task)
    return f'from {_home_of(kind)} import {kind.__name__}\nmodel = {kind.__name__}.from_pretrained(".")\nmodel.eval()'


FORMATS: dict[str, Callable[[Task], str]] = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "onnx": write_onnx,
    "hf": write_hf,
}


def _tell_of_images(task: Task) -> None:
    """What is left to the user of a model that was exported without it."""
    section = task.run.config.augment
    if section is not None and section.normalize is not None:
        mean, std = section.normalize.mean, section.normalize.std
        task.notes.append(f"Normalise images first, as the run did: mean {mean}, deviation {std} by channel.")
    if section is not None:
        task.notes.append("Images of bytes are divided by 255 before all else.")


# --- samples --------------------------------------------------------------------------------------------------------


def open_dataset(config: Config, data: Path | None) -> Any:
    """The data set to take samples from: that of a table, what the run held out, or what it was trained on."""
    if data is not None:
        given = {"df": data, "val_df": None, "val_dataset_fn": None, "val_fraction": 0.0}
        config = config.model_copy(update=given)
    missing = [each for each in (config.df, config.val_df) if isinstance(each, Missing)]
    if missing:
        raise ConfigError([f"{each.what} {each.why}" for each in missing])
    seed_generators(config.seed, "data set")
    training, validation = make_datasets(config)
    dataset = training if validation is None else validation
    if is_stream(dataset):
        raise DataError(
            f"dataset_fn returned a {type(dataset).__name__}, whose samples cannot be taken by number; "
            "return a map-style data set, or use format safetensors"
        )
    return dataset


def _why_no_samples(task: Task) -> str | None:
    """Why outputs cannot be compared; None if they can."""
    if task.run.config.train_fn is not None:
        return "only the loop of the run (train_fn) knows how its model is called"
    try:
        return None if task.batch is not None else "there are none"
    except (ConfigError, DataError) as error:
        return str(error)


def _as_measured(config: Config, batch: Any) -> Any:
    """A batch as evaluation gives it to the model."""
    return batch if config.augment is None else with_images(batch, Augment(config.augment, config.seed).evaluate)


def _expected(task: Task, batch: Any) -> Any:
    """What the trained model says of a batch."""
    with torch.no_grad(), _explained("the trained model cannot be called with samples of the data"):
        return run_model(task.run.model, _as_measured(task.run.config, batch))[0]


def _inputs_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with: positional and by name."""
    if isinstance(batch, Mapping):
        return (), {key: value for key, value in batch.items() if key != "labels"}
    return tuple(batch[:-1]), {}


# --- tracing --------------------------------------------------------------------------------------------------------


def _trace(task: Task) -> tuple[torch.export.ExportedProgram, Any, tuple[int, ...]]:
    """The model as a program, its dynamic shapes, and the sizes of batches that it takes, as far as they are tried."""
    model = _normalizing(task.run.load_model().eval(), task.run.config)
    inputs, named = _inputs_of(task.batch)
    _expected(task, task.batch)  # what fails here is an error of the model's own
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tensors_in([*inputs, *named.values()]):
        if tensor.ndim and len(tensor) == SIZES[0]:
            shapes[tensor] = {0: torch.export.Dim("batch")}
    task.say("tracing the model")
    sizes: tuple[int, ...] = SIZES
    with torch.no_grad(), _quiet():
        try:
            dynamic = shapes.dynamic_shapes(model, inputs, named)  # type: ignore[no-untyped-call]
            program = torch.export.export(model, inputs, named, dynamic_shapes=dynamic)
        except Exception:  # noqa: BLE001 - what is wrong with the model itself is said below
            dynamic, sizes = None, SIZES[:1]
            with _explained("torch.export cannot follow this model"):
                program = torch.export.export(model, inputs, named)
    _describe_inputs(task, program, sizes)
    return program, dynamic, sizes


def _normalizing(model: torch.nn.Module, config: Config) -> torch.nn.Module:
    """The model, made to normalise its images by itself where the run does that for it."""
    if config.augment is None:
        return model
    augment = Augment(config.augment, config.seed)

    def normalize(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if named:
            return inputs, with_images(named, augment.evaluate)
        return with_images((*inputs, None), augment.evaluate)[:-1], named

    model.register_forward_pre_hook(normalize, with_kwargs=True)  # a wrapper would lose the names of the inputs
    return model


def _describe_inputs(task: Task, program: torch.export.ExportedProgram, sizes: tuple[int, ...]) -> None:
    inputs, named = _inputs_of(task.batch)
    batch = "batch" if sizes == SIZES else str(SIZES[0])
    for name, tensor in zip(program.graph_signature.user_inputs, tensors_in([*inputs, *named.values()]), strict=False):
        shape = ", ".join([batch, *map(str, tensor.shape[1:])] if tensor.ndim else [])
        task.notes.append(f"Input `{name}`: {str(tensor.dtype).removeprefix('torch.')}, shape ({shape}).")
    if sizes != SIZES:
        task.notes.append(f"It takes batches of exactly {SIZES[0]} samples: the model fixes their number.")
    if task.run.config.augment is not None:
        task.notes.append("It normalises images by itself: give them as the data set of the run does.")


def _in_onnxruntime(path: Path) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def call(*inputs: Any, **named: Any) -> Any:
        arrays = [tensor.numpy() for tensor in tensors_in([*inputs, *named.values()])]
        return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]

    return call


def _names_of(outputs: Any) -> list[str]:
    if isinstance(outputs, Mapping) and len(outputs) == len(tensors_in(outputs)):
        return list(outputs)
    count = len(tensors_in(outputs))
    return ["output"] if count == 1 else [f"output_{place}" for place in range(count)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about its own insides; what comes out of it is compared."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """An error of torch's, or of the model's, in one sentence."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PacelineError(f"{what}: {reason}; use format safetensors") from error


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def _name_labels(pretrained: Any, dataset: Any) -> None:
    """Give the model's config the names of classes that the data set offers as `classes` or `label_names`."""
    whole = getattr(dataset, "base", dataset)
    names = getattr(whole, "classes", None) or getattr(whole, "label_names", None)
    config: Any = getattr(pretrained, "config", None)
    if names and len(getattr(config, "id2label", None) or ()) == len(names):
        config.id2label = dict(enumerate(map(str, names)))
        config.label2id = {str(name): place for place, name in enumerate(names)}


def _save_tokenizer(task: Task, model: torch.nn.Module) -> None:
    for owner in (model, getattr(task.dataset, "base", task.dataset)):
        tokenizer: Any = getattr(owner, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(task.folder)
            return


def _home_of(kind: type) -> str:
    """The module to import a class from: its package where that offers it."""
    package = kind.__module__.partition(".")[0]
    return package if hasattr(sys.modules.get(package), kind.__name__) else kind.__module__


# --- comparing and publishing ---------------------------------------------------------------------------------------


def _compare(task: Task, call: Call, sizes: tuple[int, ...], *, is_normalized: bool = False) -> None:
    """A PacelineError unless a loaded model says of samples what the trained one does."""
    task.say("comparing with the trained model")
    for size in sizes:
        batch = _first(size, task.batch)
        expected = tensors_in(_expected(task, batch))
        inputs, named = _inputs_of(_as_measured(task.run.config, batch) if is_normalized else batch)
        with torch.no_grad():
            outputs = tensors_in(call(*inputs, **named))
        if not expected:
            raise PacelineError("the model's output holds no tensors to compare; nothing was exported")
        if len(outputs) != len(expected) or not all(map(_is_close, outputs, expected)):
            raise PacelineError(
                f"the exported model does not say what the trained one does, on a batch of {size} samples; "
                "nothing was exported"
            )
    task.notes.append(f"Loaded again, it gave the outputs of the trained model on batches of {_listed(sizes)} samples.")


def _first(size: int, batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor[:size] if tensor.ndim else tensor)


def _is_close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    if output.shape != expected.shape:
        return False
    output, expected = output.double(), expected.double()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return bool(torch.isclose(output, expected, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True).all())


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


@contextmanager
def published(to: Path) -> Iterator[Path]:
    """A folder to write into that gets the name `to` at the end, or is removed if an error comes."""
    to = to.resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to {to} exists and is not an empty folder; choose another name")
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--to {to} cannot be made: {error.strerror}; choose another folder") from None
    try:
        yield partial
        partial.replace(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
