"""The numbers of an evaluation for a batch, and their means over all batches of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from paceline.config import Settings
from paceline.engine.losses import sum_and_count
from paceline.engine.objective import LOSS, SAME_NAME, logits_in, loss_in, objectives_of, parts_of, run_model
from paceline.errors import ConfigError, DataError
from paceline.observe.event_types import is_reserved
from paceline.user_code import with_place
from paceline.world import World

VAL_LOSS = "val_loss"


class BatchResult(NamedTuple):
    """The result of the forward pass of a batch."""

    output: Any = None  # for metrics; the logits of an output of transformers
    target: Any = None
    values: Mapping[str, Any] = {}  # numbers that were computed with it, by their names in the result
    loss_input: Any = None  # the unchanged output of the model, for `loss_fn`


class Forward:
    """Runs a model on a batch, with the functions of the config."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.objectives = settings, objectives_of(settings)
        self.names_values = settings.evaluate_fn is not None or any(
            each.takes_model for each in self.objectives.values()
        )
        objective = self.objectives.get("")
        self.is_models_own = objective is not None and objective.is_models_own
        is_plain = objective is not None and not objective.takes_model and not self.is_models_own
        self.loss_fn = objective.function if objective is not None and is_plain else None

    def measure(self, model: torch.nn.Module, batch: Any) -> BatchResult:
        """The numbers that the config's functions compute, and the inputs of metrics and `loss_fn`."""
        if self.settings.evaluate_fn is not None:
            with _explaining_gradients("evaluate_fn", "return only numbers"):
                values = evaluated(self.settings.function("evaluate_fn")(model, batch))
        elif self.names_values:
            values = self._step_values(model, batch)
        elif self.is_models_own:
            output, target = run_model(model, batch, with_labels=True)
            if "accuracy" in self.settings.metrics and isinstance(self.settings.metrics, list):
                self._refuse_shifted(output)
            return BatchResult(logits_in(output), target, {VAL_LOSS: loss_in(output)})
        else:
            return self.run(model, batch)
        if not self.settings.metrics:
            return BatchResult(values=values)
        if overwritten := sorted(values.keys() & set(self.settings.metrics)):
            raise ConfigError(
                f"metrics.{overwritten[0]} has the name of a value of {self.values_key}; rename one of them"
            )
        return self.run(model, batch)._replace(values=values)

    @staticmethod
    def _refuse_shifted(output: Any) -> None:
        """Reject `accuracy` for an output of transformers whose labels are shifted only in the model's loss."""
        if type(output).__name__.startswith("CausalLMOutput"):
            raise ConfigError(
                "metrics=accuracy compares the logits of a token with its own label, but the model predicts the next "
                "token; set a function (logits, labels) that compares logits[:, :-1] with labels[:, 1:]"
            )

    @property
    def values_key(self) -> str:
        """The key of the function that returns the named values of a batch."""
        return "evaluate_fn" if self.settings.evaluate_fn is not None else "step_fn"

    def run(self, model: torch.nn.Module, batch: Any) -> BatchResult:
        """The model's output and the target."""
        output, target = run_model(model, batch)
        return BatchResult(logits_in(output), target, loss_input=output)

    def predict(self, model: torch.nn.Module, batch: Any) -> BatchResult:
        """The return value of `predict_fn`, or the model's output."""
        if self.settings.predict_fn is not None:
            return BatchResult(self.settings.function("predict_fn")(model, batch))
        return self.run(model, batch)

    def _step_values(self, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        """The values of `step_fn` as `val_NAME`, those of phases as `val_PHASE_NAME`; the first loss is `val_loss`."""
        values: dict[str, Any] = {}
        for phase, objective in self.objectives.items():
            advice = "set evaluate_fn(model, batch); if step_fn calls backward, return the loss instead"
            with _explaining_gradients(objective.key, advice):
                loss, further = parts_of(objective(model, batch), objective.key)
            prefix = f"val_{phase}_" if phase else "val_"
            own = {f"{prefix}{name}": value for name, value in {LOSS: loss, **further}.items()}
            if overwritten := [name.removeprefix("val_") for name in own if name in values]:
                raise ConfigError(f"{objective.key} {SAME_NAME.format(name=overwritten[0])}")
            values = {VAL_LOSS: loss, **values, **own}
        return values


@contextmanager
def _explaining_gradients(key: str, advice: str) -> Iterator[None]:
    """Replace torch's error about missing gradients, since batches are evaluated without gradients."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise ConfigError(f"{key} computes gradients, which are disabled in validation; {advice}") from error


def evaluated(value: Any) -> dict[str, Any]:
    """The values of `evaluate_fn` by their names in the result: its own, and `val_loss` for `loss`."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"evaluate_fn returned a {type(value).__name__}; it must return a dict of numbers")
    for name in value:
        if not isinstance(name, str) or (name != VAL_LOSS and is_reserved(name)):
            raise ConfigError(
                f"evaluate_fn returned a value named {name!r}, which is reserved in events; choose another name"
            )
    if {LOSS, VAL_LOSS} <= value.keys():
        raise ConfigError("evaluate_fn returned loss and val_loss, which are the same number here; return one of them")
    return {VAL_LOSS if name == LOSS else name: each for name, each in value.items()}


class Measures:
    """The loss and the metrics of an evaluation, as sums and counts of each batch."""

    def __init__(self, forward: Forward, metrics: Mapping[str, Callable[..., Any]], world: World) -> None:
        self._metrics, self._world, self._key = metrics, world, forward.values_key
        self._loss_fn = None if forward.names_values else forward.loss_fn
        known = [VAL_LOSS] if forward.loss_fn is not None or forward.is_models_own else []
        self._names = None if forward.names_values else [*known, *metrics]  # None: the names of the batches' values

    def row(self, result: BatchResult, samples: int) -> dict[str, torch.Tensor]:
        """The sum and the count of each number for a batch."""
        row = {name: self._pair(value, samples, f"{self._key}'s {name}") for name, value in result.values.items()}
        if self._loss_fn is not None:
            value = _called(VAL_LOSS, self._loss_fn, result.loss_input, result.target)
            row[VAL_LOSS] = self._pair(value, samples, with_place("loss_fn", self._loss_fn))
        for name, metric in self._metrics.items():
            row[name] = self._pair(_called(name, metric, result.output, result.target), samples, name)
        return row

    def means(self, rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """The mean of each number over the batches of all ranks. All ranks."""
        names = self._names
        if names is None:
            mine = list(dict.fromkeys(name for row in rows for name in row))
            names = list(dict.fromkeys(name for of_rank in self._world.gather_objects(mine) for name in of_rank))
        nothing = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        table = nothing.new_zeros(len(rows), len(names), 2)
        for index, row in enumerate(rows):
            if names:
                table[index] = torch.stack([row.get(name, nothing) for name in names])
        sums = torch.stack(interleave(self._world.gather_rows(table))).sum(0).tolist()
        return {name: total / count if count else math.nan for name, (total, count) in zip(names, sums, strict=True)}

    def _pair(self, value: Any, samples: int, source: str) -> torch.Tensor:
        pair = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        pair[0], pair[1] = sum_and_count(value, samples, source)
        return pair


def _called(name: str, measure: Callable[..., Any], output: Any, target: Any) -> Any:
    """The value of a loss or metric; an error caused by missing labels is explained."""
    try:
        return measure(output, target)
    except (TypeError, AttributeError) as error:
        if target is not None:
            raise
        raise DataError(f"the samples have no labels, and {name} needs them ({error}); use paceline predict") from error


def interleave(of_ranks: list[Any]) -> list[Any]:
    """The results of all ranks in the order of the batches, which were assigned to the ranks in turn."""
    rounds = max(map(len, of_ranks))
    return [of_rank[index] for index in range(rounds) for of_rank in of_ranks if index < len(of_rank)]
