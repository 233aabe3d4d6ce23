"""Evaluation and prediction: each sample counted exactly once, and the same numbers for any number of ranks.

The batches of a data set are assigned to the ranks in turn. Their results are sorted into the order of the batches
before anything is summed, so no sum depends on the number of ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.config import Settings
from paceline.data.evaluation import EvalBatch
from paceline.data.feed import Feed, to_device
from paceline.data.seeding import seed_generators
from paceline.data.trees import map_tensors
from paceline.engine.forward_state import ForwardState, ParameterKey, Snapshot
from paceline.engine.loss_checks import LossChecks
from paceline.engine.losses import make_metrics, sum_and_count
from paceline.engine.outer_state import outer_state
from paceline.engine.precision import autocast
from paceline.engine.probe import CollectiveFound, Collectives, copy_or_none
from paceline.engine.step_probe import CHANGES_WEIGHTS, state_of
from paceline.engine.training_mode import keeping_modes
from paceline.errors import ConfigError, DataError
from paceline.worker.measures import BatchResult, Forward, Measures, interleave
from paceline.world import World

HALVES = (torch.bfloat16, torch.float16)
BatchForward = Callable[[torch.nn.Module, Any], BatchResult]
OnRound = Callable[
    [int, int], None
]  # (rounds done, rounds): every rank has a batch in each round, possibly except the last


class Evaluator:
    """Measures a model on a data set whose batches are divided among the ranks."""

    def __init__(self, feed: Feed, settings: Settings, world: World, moving: set[ParameterKey] | None = None) -> None:
        """`moving` names frozen parameters that a forward pass changes; it may be filled later, by the first step."""
        self.feed, self.settings, self.world, self.moving = feed, settings, world, moving
        self.batches, self.sampler = feed.evaluation_batches()
        self.forward = Forward(settings)
        metrics = make_metrics(settings.metrics)
        self.stateful: dict[str, Any] = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
        for name, metric in self.stateful.items():
            if not hasattr(metric, "reset") or not hasattr(metric, "update"):
                raise ConfigError(f"metrics.{name} has a method compute, so it also needs reset and update")
            # It receives every batch on every rank, so there is nothing to synchronise.
            metric.distributed_available_fn = lambda: False
        functions = {name: metric for name, metric in metrics.items() if name not in self.stateful}
        self.measures = Measures(self.forward, functions, world)

    @torch.no_grad()
    def measure(self, model: torch.nn.Module, on_round: OnRound) -> dict[str, float]:
        """The mean of the loss and of each metric over all samples. All ranks."""
        rows = []
        for metric in self.stateful.values():
            metric.reset()
        for done in self._results(self.forward.measure, model, on_round):
            if done is not None:
                rows.append(self.measures.row(*done))
            if self.stateful:
                self._update_stateful(done[0] if done is not None else None)
            done = None  # its outputs may be large: free them before the next batch
        means = self.measures.means(rows)
        return means | {name: _compute(name, metric) for name, metric in self.stateful.items()}

    @torch.no_grad()
    def predict(self, model: torch.nn.Module, on_round: OnRound) -> torch.Tensor | None:
        """The model's output for every sample, in the order of the data set, in the host memory of rank 0. All ranks.

        The outputs may be large, so the other ranks have none.
        """
        mine = []
        for done in self._results(self.forward.predict, model, on_round):
            if done is not None:
                mine.append(_rows_of(self._tensor_in(done[0]), done[1]).cpu())
        of_ranks = self.world.gather_objects({tuple(part.shape[1:]) for part in mine})
        if len(shapes := sorted(set[tuple[int, ...]]().union(*of_ranks))) > 1:
            raise DataError(
                f"predict needs outputs of one shape for all samples, not {shapes[0]} and {shapes[-1]}; if each "
                "batch is padded to its longest sample, pad all batches to one length"
            )
        parts = self.world.gather_on_main(mine)
        return torch.cat(interleave(parts)) if self.world.is_main else None

    def _tensor_in(self, result: BatchResult) -> torch.Tensor:
        if isinstance(result.output, torch.Tensor):
            return result.output
        kind = type(result.output).__name__
        if self.settings.predict_fn is not None:
            raise ConfigError(f"predict_fn returned a {kind}; it must return a tensor with a row for each sample")
        raise DataError(
            f"predict needs a model that returns a tensor; this one returns a {kind}; set predict_fn(model, batch)"
        )

    @torch.no_grad()
    def losses(self, model: torch.nn.Module, on_round: OnRound) -> torch.Tensor:
        """The loss of each single sample, in the order of the data set, on the CPU of all ranks. All ranks."""
        results = self._results(self.forward.run, model, on_round)
        mine = [self._each_loss(*done).cpu() for done in results if done is not None]
        return torch.cat(interleave(self.world.gather_objects(mine)))

    @torch.no_grad()
    def try_losses(self, model: torch.nn.Module) -> None:
        """Call `losses` on one batch, so that an error occurs before the first epoch and not after it."""
        results = self._results(self.forward.run, model, lambda done, total: None)
        done = next(results)
        if done is not None:
            result, each = done[0], self._each_loss(*done)
            total, count = sum_and_count(self._loss_fn(result.loss_input, result.target), len(each), "loss_fn")
        results.close()  # after the call of the loss: this restores its buffers
        if done is None:
            return
        # If all samples have the same loss, so does the batch, for any weights of the samples.
        is_mean = torch.allclose(total.double() / count, each[0], rtol=1e-3, equal_nan=True)
        if not is_mean and torch.allclose(each, each[0], rtol=0, atol=0, equal_nan=True):
            raise DataError(
                f"curriculum.by=loss but loss_fn returns {each[0]:g} for every single sample, as if it compared them "
                "with each other; set difficulty_fn or curriculum.column instead"
            )

    @torch.no_grad()
    def try_measures(self, model: torch.nn.Module) -> list[str] | None:
        """Measure this rank's first batch, so that an error occurs before the first epoch and not after it.

        Uses a copy of the model: state that a forward pass leaves, such as a cache, would differ between ranks. Returns
        the names of the numbers; None if unknown.
        """
        batch = next(iter(self.batches), None)
        trial = copy_or_none(model)
        if batch is None or trial is None:
            return None
        weights = {name: state_of(p) for name, p in trial.named_parameters() if p.requires_grad}
        try:
            with (
                self._evaluating(self.forward.measure, trial) as result_of,
                Collectives(is_allowed=False),
                LossChecks(),
            ):
                result, samples = result_of(batch)
                row = self.measures.row(result, samples)
        except CollectiveFound:  # batch sizes may differ between ranks here; the probe before the first step reports it
            return None
        for name, parameter in trial.named_parameters():
            if name in weights and state_of(parameter) != weights[name]:
                raise ConfigError(CHANGES_WEIGHTS.format(key=self.forward.values_key, name=name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about a batch without some of the classes
            for name, metric in self.stateful.items():
                metric.reset()
                metric.update(*to_device((result.output, result.target), torch.device("cpu")))
                try:
                    _compute(name, metric)
                except ConfigError:
                    raise
                except Exception:  # noqa: BLE001 - it may need more samples than these
                    pass
                metric.reset()
        return [*row, *self.stateful]

    def _results(
        self, forward: BatchForward, model: torch.nn.Module, on_round: OnRound
    ) -> Generator[tuple[BatchResult, int] | None]:
        """The result and size of each of this rank's batches; None if it has no batch in the last round."""
        rounds = self.sampler.rounds
        with self._evaluating(forward, model) as result_of:
            for done, batch in enumerate(self.batches):
                yield result_of(batch)
                on_round(done + 1, rounds)
            if len(self.sampler) < rounds:
                yield None
                on_round(rounds, rounds)

    @contextmanager
    def _evaluating(
        self, forward: BatchForward, model: torch.nn.Module
    ) -> Iterator[Callable[[EvalBatch], tuple[BatchResult, int]]]:
        """The model in evaluation mode, as a function of a batch. Buffers are restored for each batch and after."""
        buffers, before = ForwardState(model, outer_state(self.settings), self.moving), Snapshot()
        before.take(buffers.tensors())

        def result_of(batch: EvalBatch) -> tuple[BatchResult, int]:
            seed_generators(self.settings.seed, "evaluation", batch.batch)
            before.restore(buffers.tensors())
            with autocast(self.settings.precision, self.world.device):
                result = forward(model, self.feed.evaluation_batch(batch))
            output = in_fp32(result.output)
            loss_input = output if result.loss_input is result.output else in_fp32(result.loss_input)
            return result._replace(output=output, loss_input=loss_input), len(batch.indices)

        with keeping_modes(model):
            model.eval()
            try:
                yield result_of
            finally:
                before.restore(buffers.tensors())

    @property
    def _loss_fn(self) -> Callable[..., Any]:
        assert self.forward.loss_fn is not None  # checked with the config
        return self.forward.loss_fn  # type: ignore[no-any-return]

    def _each_loss(self, result: BatchResult, samples: int) -> torch.Tensor:
        """The loss of each single sample; NaN if its count is 0."""
        losses, trees = [], (result.loss_input, result.target)
        for index in range(samples):
            row = [map_tensors(tree, partial(_row_of, index=index, samples=samples)) for tree in trees]
            total, count = sum_and_count(self._loss_fn(*row), 1, "loss_fn")
            losses.append(total.double() / count)
        return torch.stack(losses)

    def _update_stateful(self, result: BatchResult | None) -> None:
        """Update metrics that have state, such as those of torchmetrics, with all batches in order. All ranks."""
        mine = None if result is None else to_device((result.output, result.target), torch.device("cpu"))
        for batch in self.world.gather_objects(mine):
            if batch is not None:
                for metric in self.stateful.values():
                    metric.update(*batch)


def _compute(name: str, metric: Any) -> float:
    value = metric.compute()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(f"metrics.{name} returned a {what}; it must return one number") from None


def _row_of(tensor: torch.Tensor, *, index: int, samples: int) -> torch.Tensor:
    """The row of one sample, as a batch of one."""
    if tensor.ndim == 0 or len(tensor) != samples:
        raise DataError(
            f"curriculum.by=loss needs outputs and targets with a row for each of {samples} samples, not a tensor of "
            f"shape {tuple(tensor.shape)}; set difficulty_fn or curriculum.column instead"
        )
    return tensor[index : index + 1]


def _rows_of(output: torch.Tensor, samples: int) -> torch.Tensor:
    """A model's output with one row for each sample; a model may have squeezed a batch of one."""
    if samples == 1 and (output.ndim == 0 or len(output) != 1):
        return output[None]
    if output.ndim == 0 or len(output) != samples:
        raise DataError(
            f"predict needs one row of output for each sample; {samples} samples gave an output of shape "
            f"{tuple(output.shape)}; check collate_fn and the output of the model"
        )
    return output


def in_fp32(output: Any) -> Any:
    """Outputs of autocast in fp32: sums and thresholds with 8 bits of precision would be wrong."""
    if isinstance(output, MutableMapping):  # including the output classes of transformers, whose type is kept
        full = copy.copy(output)
        for key, value in output.items():
            full[key] = in_fp32(value)
        return full
    if isinstance(output, tuple) and any(isinstance(each, torch.nn.Parameter) for each in output):
        return output  # the loss computes the last layer, in the dtype of its arguments
    return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)
