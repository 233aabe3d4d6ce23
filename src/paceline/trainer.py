"""`Trainer`, which takes every config key as a keyword. Training itself is in `launch` and `worker`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Config, build
from paceline.errors import Stopped
from paceline.system.signals import requests_deferred

if TYPE_CHECKING:
    from paceline.results.result import Result


def build_config(raw: Mapping[str, Any], folder: Path | None = None, overridden: Sequence[str] = ()) -> Config:
    """A valid config whose launcher, trackers, optimizer, metrics and loss exist; otherwise one ConfigError for all.

    `overridden` are the keys of the command line, for the words in messages.
    """
    return build(raw, folder=folder, overridden=overridden, checks=CHECKS)


def _unknown_launcher(config: Config) -> Iterator[str]:
    from paceline.launch import unknown_launcher

    yield from unknown_launcher(config)


def _unknown_trackers(config: Config) -> list[str]:
    from paceline.observe.sinks.registry import problems_with

    return problems_with(config.log.trackers)


def _reserved_metrics(config: Config) -> Iterator[str]:
    from paceline.observe.event_types import is_reserved

    for name in sorted(name for name in config.metrics if name == "val_loss" or is_reserved(name)):
        yield f"metrics.{name} has a name that is reserved in events and results; choose another name"


def _data_problems(config: Config) -> Iterator[str]:
    from paceline.data.weights import weight_problems  # imports torch, as the engine does

    yield from weight_problems(config)


def _engine_problems(config: Config) -> Iterator[str]:
    """The problems that only torch and the engine can find."""
    # Imports torch, so it must come after the user's modules, which may set environment variables for torch.
    from paceline.engine.config_checks import unknown_names, unsuitable_loss

    yield from unknown_names(config)
    yield from unsuitable_loss(config)


CHECKS = (_unknown_launcher, _unknown_trackers, _reserved_metrics, _data_problems, _engine_problems)


class Trainer:
    """One run, ready to start. Every keyword is a config key; functions may be lambdas, closures or from a notebook."""

    def __init__(
        self,
        model_fn: Any = None,
        dataset_fn: Any = None,
        df: Any = None,
        train_fn: Any = None,
        batch_size: int | None = None,
        num_epochs: int | None = None,
        **options: Any,
    ) -> None:
        named = {"model_fn": model_fn, "dataset_fn": dataset_fn, "df": df, "train_fn": train_fn}
        raw = {**named, "batch_size": batch_size, "num_epochs": num_epochs, **options}
        self.config: Config = build_config(raw)
        self._folder, self._is_in_script = Path(), True

    @classmethod
    def from_config(cls, config: Config, folder: Path) -> Trainer:
        """A trainer for a config from `build_config`, read from a file in `folder`."""
        trainer = cls.__new__(cls)
        trainer.config, trainer._folder, trainer._is_in_script = config, folder, False
        return trainer

    def start(self) -> Result:
        """Train on the ranks that the config asks for, and return the result; may be called again."""
        with requests_deferred():
            from paceline import launch
            from paceline.observe.sinks import registry

            registry.check(self.config.log.trackers)
            launch.prepare(self.config.__dict__, self._folder)  # before torch is imported in this process
            from paceline.launch.setup import TRAIN
            from paceline.results.result import result_of

        try:
            outcome = launch.start(self.config, TRAIN, self._folder)
        except Stopped as stopped:
            if self._is_in_script:  # a command prints it; Python exits with the code alone
                print(f'paceline: {stopped}, or with Trainer(…, resume="auto")', file=sys.stderr, flush=True)
            raise
        return result_of(outcome, self.config, self._folder)
