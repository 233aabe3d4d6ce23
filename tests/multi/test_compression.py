"""Compressed gradients on two ranks: they train, and the replicas stay equal, also with a sharded optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline import Trainer
from paceline.engine import bucket_hook
from support.runs import warnings_in


class Lines(torch.utils.data.TensorDataset):
    """A line to be learnt; some targets may be broken."""

    def __init__(self, broken: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(256, 8, generator=generator)
        y = x @ torch.randn(8, 4, generator=generator)
        if broken is not None:
            y[broken] = torch.nan
        super().__init__(x, y)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def train(**options: Any) -> Any:
    return Trainer(
        model_fn=net, loss_fn=nn.functional.mse_loss, batch_size=16, lanes=4, procs=2, threads=1, device="cpu",
        val_fraction=0, check_replicas_every=1, exact=False, optimizer={"name": "sgd", "lr": 0.05},
        bucket_mb=0.0005, **options,
    ).start()  # fmt: skip


def test_sums_in_16_bits_train_and_are_close_to_those_in_32() -> None:
    half, full = (train(dataset_fn=Lines, num_epochs=5, compression=kind) for kind in ("bf16", "none"))
    sharded = train(dataset_fn=Lines, num_epochs=5, compression="bf16", shard_optimizer=True)
    assert sharded.weights_sha256 == half.weights_sha256
    assert half.history[-1]["train_loss"] < 0.7 * half.history[0]["train_loss"]
    assert half.weights_sha256 != full.weights_sha256
    torch.testing.assert_close(
        dict(half.load_model().state_dict()), dict(full.load_model().state_dict()), rtol=0.05, atol=0.01
    )


def test_matrices_of_low_rank_train_before_and_after_a_step_that_is_not_finite() -> None:
    """A sample whose loss is NaN spoils one step of each epoch: not the memory of what was left out, for ever."""
    whole = bucket_hook.POWERSGD_START_STEP // 4  # epochs of four steps that are not compressed
    low, full = (
        train(dataset_fn=lambda: Lines(broken=7), num_epochs=whole + 10, compression=kind, shard_optimizer=sharded)
        for kind, sharded in (("powersgd", True), ("none", False))
    )
    losses, others = ([row["train_loss"] for row in result.history] for result in (low, full))
    assert losses[:whole] == others[:whole]
    assert losses[whole:] != others[whole:]
    assert losses[whole:] == pytest.approx(others[whole:], rel=0.1)
    assert max(losses[-5:]) < 0.5 * min(losses[:3])
    skipped = warnings_in(low.run_dir)
    assert len(skipped) == whole + 10
    assert all("loss nan" in text for text in skipped)
