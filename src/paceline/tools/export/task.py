"""A model on its way out: samples to try it on, what it says of them, and whether what was written says the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.config import Config
from paceline.config.functions import Missing
from paceline.data.augment import Augment
from paceline.data.feed import with_images
from paceline.data.loader import EvalBatch, KeyedDataset
from paceline.data.rows import rows_of
from paceline.data.seeding import seed_generators
from paceline.data.sources import is_stream, make_datasets
from paceline.data.trees import map_tensors, tensors_in
from paceline.engine.replica import run_model
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.world import World

if TYPE_CHECKING:
    from paceline.results.load import TrainedRun

SIZES = (8, 3, 1)  # of the batches that are compared; the first is the one that is traced
TOLERANCE = 1e-4  # of the largest output: other kernels add in another order
HERE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")  # this process alone

Say = Callable[[str], None]


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
        return _open_dataset(self.run.config, self.data)

    @cached_property
    def batch(self) -> Any:
        """The first samples, as the data set gives them: images are not normalised yet."""
        config, places = self.run.config, [place % len(self.dataset) for place in range(SIZES[0])]
        rows = rows_of(self.dataset, config.data_on_device, HERE)
        if rows is not None:
            return rows.gather(rows.finder(self.dataset)(np.asarray(places)))
        return KeyedDataset(self.dataset, config.seed).whole(EvalBatch(0, places)).data

    def expected(self, batch: Any) -> Any:
        """What the trained model says of a batch."""
        with torch.no_grad(), explained("the trained model cannot be called with samples of the data"):
            return run_model(self.run.model, _as_measured(self.run.config, batch))[0]

    def compare(self, call: Callable[..., Any], sizes: tuple[int, ...], *, is_normalized: bool = False) -> None:
        """A PacelineError unless a loaded model says of samples what the trained one does."""
        self.say("comparing with the trained model")
        for size in sizes:
            batch = _first(size, self.batch)
            expected = tensors_in(self.expected(batch))
            inputs, named = inputs_of(_as_measured(self.run.config, batch) if is_normalized else batch)
            with torch.no_grad(), explained(f"the exported model does not take a batch of {size} samples"):
                outputs = tensors_in(call(*inputs, **named))
            if not expected:
                raise PacelineError("the model's output holds no tensors to compare; nothing was exported")
            if len(outputs) != len(expected) or not all(map(_is_close, outputs, expected)):
                raise PacelineError(
                    f"the exported model does not say what the trained one does, on a batch of {size} samples; "
                    "nothing was exported"
                )
        tried = ", ".join(map(str, sizes))
        self.notes.append(f"Loaded again, it gave the outputs of the trained model on batches of {tried} samples.")

    def tell_of_images(self) -> None:
        """What is left to the user of a model that was exported without it."""
        section = self.run.config.augment
        if section is not None and section.normalize is not None:
            mean, std = section.normalize.mean, section.normalize.std
            self.notes.append(f"Normalise images first, as the run did: mean {mean}, deviation {std} by channel.")
        if section is not None:
            self.notes.append("Images of bytes are divided by 255 before all else.")


def inputs_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with: positional and by name."""
    if isinstance(batch, Mapping):
        return (), {key: value for key, value in batch.items() if key != "labels"}
    return tuple(batch[:-1]), {}


@contextmanager
def explained(what: str) -> Iterator[None]:
    """An error of torch's, or of the model's, in one sentence."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # what torch.onnx says itself is advice, in colours
            cause = cause.__cause__
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(".")
        raise PacelineError(f"{what}: {reason}; use format safetensors") from error


def _open_dataset(config: Config, data: Path | None) -> Any:
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


def _as_measured(config: Config, batch: Any) -> Any:
    """A batch as evaluation gives it to the model."""
    return batch if config.augment is None else with_images(batch, Augment(config.augment, config.seed).evaluate)


def _first(size: int, batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor[:size] if tensor.ndim else tensor)


def _is_close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    if output.shape != expected.shape:
        return False
    output, expected = output.double(), expected.double()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return bool(torch.isclose(output, expected, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True).all())
