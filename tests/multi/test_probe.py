"""A collective in a forward pass: refused before the first step, or taken where all ranks meet in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from exactness_cases import Images
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import Trainer
from paceline.errors import ConfigError
from support.runs import warnings_in


class Gathering(nn.Module):
    """Subtracts the mean over the batches of all ranks, as losses with negatives from other ranks gather features."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.layer, self.always = nn.Linear(36, 2), always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x.flatten(1))
        if not self.training and not self.always:
            return output
        everywhere = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, output.detach().mean(0))
        return output - torch.stack(everywhere).mean(0)


def start(**options: Any) -> Any:
    defaults: dict[str, Any] = {
        "model_fn": Gathering, "dataset_fn": lambda: Images(25), "val_fraction": 0, "loss_fn": cross_entropy,
        "batch_size": 3, "num_epochs": 1, "threads": 1, "device": "cpu", "procs": 2,
    }  # fmt: skip
    return Trainer(**{**defaults, **options}).start()


def test_it_is_refused_with_its_place_where_it_would_break_a_promise() -> None:
    """Also if the evaluation would call it, which is tried first."""
    with pytest.raises(ConfigError, match=r"exact=true but .* calls allgather \(.*\.py:\d+\), .* exact: false"):
        start(lanes=2, model_args={"always": True}, val_fraction=0.2)


def test_it_is_refused_where_ranks_have_several_lanes() -> None:
    """The last step has six samples in three lanes: two for rank 0, which would wait for rank 1 in the second."""
    with pytest.raises(
        ConfigError, match=r"lanes=4 but .* calls allgather .*one lane for each of 2 ranks; leave lanes"
    ):
        start(lanes=4, exact=False, dataset_fn=lambda: Images(30))


def test_it_is_taken_where_all_ranks_meet_and_the_short_step_is_reported() -> None:
    result = start(exact=False)
    [warning] = warnings_in(result.run_dir)
    assert "calls allgather: in the last step of an epoch the ranks have batches of different sizes" in warning
    assert result.step == 5
