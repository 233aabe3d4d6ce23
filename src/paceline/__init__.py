"""Paceline: train PyTorch models with Distributed Data Parallel. One run, one hash, from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import handle_uncaught

__version__ = "0.1.0"
__all__ = [
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "GradualUnfreeze",
    "ImageLogger",
    "LearningRateMonitor",
    "MeanTeacher",
    "Muon",
    "Result",
    "Run",
    "Sink",
    "StandardScaler",
    "Sum",
    "Trainer",
    "cached_tensors",
    "current_run",
    "datasets",
    "errors",
    "every",
    "indices_at",
    "linear_cross_entropy",
    "load",
    "models",
    "shard",
]  # fmt: skip

if TYPE_CHECKING:
    from paceline import errors
    from paceline.callbacks import (
        BestCheckpoint,
        Callback,
        EarlyStopping,
        GradualUnfreeze,
        ImageLogger,
        LearningRateMonitor,
        MeanTeacher,
        Run,
        current_run,
    )
    from paceline.config.phases import every
    from paceline.data.order import indices_at
    from paceline.data.scaler import StandardScaler
    from paceline.data.shard import shard
    from paceline.engine.fused_loss import linear_cross_entropy
    from paceline.engine.losses import Sum
    from paceline.engine.muon import Muon
    from paceline.hub import datasets, models
    from paceline.hub.cache import cached_tensors
    from paceline.observe.sinks.sink import Sink
    from paceline.results.load import load
    from paceline.results.result import Result
    from paceline.trainer import Trainer

_HOMES = {
    "Trainer": "paceline.trainer",
    "Callback": "paceline.callbacks",
    "BestCheckpoint": "paceline.callbacks",
    "EarlyStopping": "paceline.callbacks",
    "GradualUnfreeze": "paceline.callbacks",
    "ImageLogger": "paceline.callbacks",
    "LearningRateMonitor": "paceline.callbacks",
    "MeanTeacher": "paceline.callbacks",
    "Run": "paceline.callbacks",
    "current_run": "paceline.callbacks",
    "Result": "paceline.results.result",
    "Muon": "paceline.engine.muon",
    "Sink": "paceline.observe.sinks.sink",
    "StandardScaler": "paceline.data.scaler",
    "Sum": "paceline.engine.losses",
    "cached_tensors": "paceline.hub.cache",
    "every": "paceline.config.phases",
    "indices_at": "paceline.data.order",
    "linear_cross_entropy": "paceline.engine.fused_loss",
    "load": "paceline.results.load",
    "shard": "paceline.data.shard",
}

_MODULES = {"datasets": "paceline.hub.datasets", "errors": "paceline.errors", "models": "paceline.hub.models"}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    # Names are loaded when they are used: `paceline --help` must not wait for torch.
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


handle_uncaught()
