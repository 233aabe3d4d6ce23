"""The batches of an evaluation."""

from __future__ import annotations

import pytest

from paceline.data.evaluation import evaluation_loader
from support.worlds import world_of


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(("size", "batch_size"), [(20, 4), (21, 4), (3, 4), (1, 1), (17, 1)])
def test_evaluation_takes_every_sample_once_in_the_same_batches_at_any_world_size(
    size: int, batch_size: int, world_size: int
) -> None:
    ranks = [
        [
            batch.data.tolist()
            for batch in evaluation_loader(
                range(size), batch_size=batch_size, seed=0, workers=0, world=world_of(rank, world_size)
            )
        ]
        for rank in range(world_size)
    ]
    together = [batch for rank in ranks for batch in rank]
    assert sorted(together) == [list(range(n, min(n + batch_size, size))) for n in range(0, size, batch_size)]
    counts = [len(rank) for rank in ranks]
    assert max(counts) - min(counts) <= 1
