"""One export: samples to call the model with, its outputs, and the comparison with the exported model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from paceline.config import Config
from paceline.config.functions import Missing
from paceline.data.augment import Augment
from paceline.data.feed import with_images
from paceline.errors import ConfigError, DataError, MissingExtra, PacelineError

if TYPE_CHECKING:
    from paceline.results.load import TrainedRun

BATCH_SIZES = (8, 3, 1)  # of the batches that are compared; the model is traced with the first
TOLERANCE = 1e-4  # relative to the largest output: other kernels sum in a different order


@dataclass
class ExportTask:
    """The run to export, the folder to write into, and notes for the model card."""

    run: TrainedRun
    folder: Path
    data: Path | None
    on_progress: Callable[[str], None]
    notes: list[str] = field(default_factory=list)  # sentences for the card, about the use of the model

    @cached_property
    def dataset(self) -> Any:
        """The data set of the file `data`; else of the run's validation data, if it has any; else of its data."""
        self.on_progress("opening the data set")
        return _open_dataset(self.run.config, self.data)

    @cached_property
    def batch(self) -> Any:
        """The first samples of the data set; images are not normalised yet."""
        places = [place % len(self.dataset) for place in range(BATCH_SIZES[0])]
        [batch] = DataLoader(self.dataset, batch_sampler=[places], collate_fn=self._collate())
        return dict(batch) if isinstance(batch, Mapping) else batch

    def _collate(self) -> Callable[[Any], Any]:
        return self.run.config.collate or _collate_of(self.dataset)

    def expected(self, batch: Any) -> Any:
        """The output of the trained model for a batch."""
        with torch.no_grad(), explained("the trained model cannot be called with samples of the data"):
            inputs, named = inputs_of(with_normalized_images(batch, self.run.config))
            return self.run.model(*inputs, **named)

    def compare(self, call: Callable[..., Any], sizes: tuple[int, ...], *, is_normalized: bool = False) -> None:
        """Raise a PacelineError unless a loaded model has the outputs of the trained one for batches of `sizes`."""
        self.on_progress("comparing with the trained model")
        for size in sizes:
            batch = _first(size, self.batch)
            expected = tensors_in(self.expected(batch))
            inputs, named = inputs_of(with_normalized_images(batch, self.run.config) if is_normalized else batch)
            with torch.no_grad(), explained(f"the exported model does not accept a batch of {size} samples"):
                outputs = tensors_in(call(*inputs, **named))
            if not expected:
                raise PacelineError("the model's output contains no tensors to compare; nothing was exported")
            if len(outputs) != len(expected) or not all(map(_is_close, outputs, expected)):
                raise PacelineError(
                    f"the outputs of the exported model differ from those of the trained one, for a batch of {size} "
                    "samples; nothing was exported"
                )
        tried = ", ".join(map(str, sizes))
        self.notes.append(
            f"Verified after loading: the outputs agree with those of the trained model for batches of {tried} samples."
        )

    def note_normalization(self) -> None:
        """Note the preprocessing of images that the exported model does not contain."""
        section = self.run.config.augment
        if section is not None and section.normalize is not None:
            mean, std = section.normalize.mean, section.normalize.std
            self.notes.append(
                f"Normalise images first, as in training: mean {mean}, standard deviation {std} per channel."
            )
        if section is not None:
            self.notes.append("Divide images of type uint8 by 255 first.")


def inputs_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the model is called with: positional, and by name."""
    if isinstance(batch, Mapping):
        return (), {key: value for key, value in batch.items() if key != "labels"}
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise DataError(
            f"a batch is a {type(batch).__name__}; the data set must return (*inputs, target), or a dict with labels"
        )
    return tuple(batch[:-1]), {}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in an output or in inputs, in order."""
    leaves = tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def with_normalized_images(batch: Any, config: Config) -> Any:
    """A batch as the model receives it in evaluation."""
    return batch if config.augment is None else with_images(batch, Augment(config.augment, config.seed).evaluate)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of torch or of the model into a PacelineError of one sentence."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the text of torch.onnx itself is coloured advice
            cause = cause.__cause__
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(".")
        raise PacelineError(f"{what}: {reason}; use format safetensors") from error


def _open_dataset(config: Config, data: Path | None) -> Any:
    """The data set to take samples from; its functions are called in a run's order, because they may share state."""
    if data is not None:
        config = config.model_copy(update={"df": data, "val_df": None, "val_dataset_fn": None})
    missing = [table for table in (config.df, config.val_df) if isinstance(table, Missing)]
    if missing:
        raise ConfigError([f"{table.what} {table.why}" for table in missing])
    key = "dataset_fn"
    dataset = config.function(key)(*_read_table(config.df), **config.dataset_args)
    if config.val_dataset_fn is not None:
        key = "val_dataset_fn"
        dataset = config.function(key)(*_read_table(config.val_df))
    elif config.val_df is not None:
        dataset = config.function(key)(*_read_table(config.val_df), **config.dataset_args)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{key} returned a {type(dataset).__name__}, whose samples have no index; "
            "return a map-style data set, or use format safetensors"
        )
    if len(dataset) == 0:
        raise DataError(f"{key} returned an empty data set")
    return dataset


def _read_table(table: Any) -> list[Any]:
    """The arguments of a data set function: the DataFrame, read if it is a file; none without a table."""
    if not isinstance(table, Path):
        return [] if table is None else [table]
    import pandas as pd

    if table.suffix.lower() != ".parquet":
        return [pd.read_csv(table)]
    try:
        return [pd.read_parquet(table)]
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", f"reading {table.name}") from None


def _collate_of(dataset: Any) -> Callable[[Any], Any]:
    """The `collate_fn` of the data set if it has one; else torch's default, unless samples are already a batch."""
    while isinstance(dataset, Subset) and not hasattr(dataset, "collate_fn"):
        dataset = dataset.dataset
    collate: Callable[[Any], Any] = getattr(dataset, "collate_fn", _collate)
    return collate


def _collate(samples: Any) -> Any:
    return samples if isinstance(samples, (tuple, Mapping)) else default_collate(samples)


def _first(size: int, batch: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor[:size] if tensor.ndim else tensor, batch)


def _is_close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    if output.shape != expected.shape:
        return False
    output, expected = output.double(), expected.double()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return bool(torch.isclose(output, expected, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True).all())
