"""`Config`: the settings of one run, and the values derived from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import PrivateAttr

from paceline.config.execution_keys import NeverLoseARun, SizeAndSpeed, WhereItRuns
from paceline.config.functions import is_object
from paceline.config.sections import Section
from paceline.config.training_keys import TheManagedLoop, TheRun, WhatToTrain, YourOwnLoop
from paceline.config.values import ends
from paceline.config.written import Origin
from paceline.config.yaml import dump_yaml, to_plain

# In the order of the keys in config.yaml, in the documentation and in the signature of Trainer.
GROUPS: tuple[type[Section], ...] = (
    TheRun, WhatToTrain, YourOwnLoop, TheManagedLoop, SizeAndSpeed, NeverLoseARun, WhereItRuns,
)  # fmt: skip


# Pydantic takes the keys of the last base first.
class Config(WhereItRuns, NeverLoseARun, SizeAndSpeed, TheManagedLoop, YourOwnLoop, WhatToTrain, TheRun):
    """The settings of one run, under the same names in Python, in `config.yaml` and on the command line."""

    _names: dict[str, str] = PrivateAttr(default_factory=dict)  # of the objects that the user specified by name
    _origin: Origin = PrivateAttr(default_factory=Origin)  # for the words in messages about the config

    @property
    def origin(self) -> Origin:
        """The places where the user typed the keys, in a config from `build`."""
        return self._origin

    def function(self, key: str) -> Callable[..., Any]:
        """The function under `key`, in a config from `build`."""
        value = getattr(self, key)
        assert callable(value), key
        return value  # type: ignore[no-any-return]

    @property
    def collate(self) -> Callable[[Any], Any] | None:
        """The `collate_fn`, in a config from `build`."""
        return None if self.collate_fn is None else self.function("collate_fn")

    @property
    def takes_run(self) -> bool:
        """Whether `train_fn` has a parameter `run`, through which it is saved and resumed."""
        try:
            return callable(self.train_fn) and "run" in inspect.signature(self.train_fn).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            return False

    @property
    def keeps_state(self) -> bool:
        """Whether checkpoints contain the whole state of the run: in the managed loop and a `train_fn` with `run`."""
        return self.train_fn is None or self.takes_run

    @property
    def procs_range(self) -> tuple[int, int] | None:
        """The lowest and highest number of processes; None if the config does not set it."""
        return ends(self.procs)

    @property
    def nodes_range(self) -> tuple[int, int] | None:
        """The lowest and highest number of hosts; None if the config does not set it."""
        return ends(self.nodes)

    def to_yaml(self) -> str:
        """The config as YAML: functions by name, tables in memory by their type."""
        plain = {key: to_plain(value) for key, value in self.__dict__.items() if value is not None}
        objects = {key: name for key, name in self._names.items() if is_object(self.__dict__[key])}
        return dump_yaml({**plain, **objects})
