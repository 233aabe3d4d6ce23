"""Paceline: train PyTorch models with Distributed Data Parallel. One run, one hash, from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Muon", "Result", "StandardScaler", "Sum", "Trainer", "cached_tensors", "datasets", "errors", "indices_at",
    "linear_cross_entropy", "load", "models", "shard",
]  # fmt: skip

if TYPE_CHECKING:
    from paceline import datasets, errors, models
    from paceline.cache import cached_tensors
    from paceline.data.order import indices_at
    from paceline.data.shard import shard
    from paceline.fused_loss import linear_cross_entropy
    from paceline.metrics import Sum
    from paceline.muon import Muon
    from paceline.result import Result
    from paceline.scaler import StandardScaler
    from paceline.trained import load
    from paceline.trainer import Trainer

_HOMES = {
    "Trainer": "paceline.trainer",
    "Result": "paceline.result",
    "Muon": "paceline.muon",
    "StandardScaler": "paceline.scaler",
    "Sum": "paceline.metrics",
    "cached_tensors": "paceline.cache",
    "indices_at": "paceline.data.order",
    "linear_cross_entropy": "paceline.fused_loss",
    "load": "paceline.trained",
    "shard": "paceline.data.shard",
}


def __getattr__(name: str) -> Any:
    # Names are loaded when they are used: `paceline --help` must not wait for torch.
    import importlib

    if name in ("datasets", "errors", "models"):
        return importlib.import_module(f"paceline.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
