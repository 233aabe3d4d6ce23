"""One run, one hash: every case gives the same weights, optimizer state and numbers on 1, 3 and 4 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import exactness_cases as matrix
import pytest
import torch
from torch.nn import functional

from paceline import Trainer, indices_at
from paceline.data.seeding import seed_generators
from paceline.errors import RankFailed

Outcomes = dict[str, dict[str, Any]]


def run_matrix(folder: Path, procs: int) -> Outcomes:
    """Train all cases on this number of ranks, in new processes."""
    folder.mkdir()
    out = folder / "outcomes.json"
    torchrun = Path(sys.executable).parent / "torchrun"
    ended = subprocess.run(
        [torchrun, "--standalone", f"--nproc_per_node={procs}", matrix.__file__, out], cwd=folder, check=False,
        env={**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(out.read_text())


class Matrix(dict[int, Outcomes]):
    """What all cases gave, by the number of ranks; each number is run when a test needs it for the first time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, ranks: int) -> Outcomes:
        self[ranks] = run_matrix(self.folder / str(ranks), ranks)
        return self[ranks]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """What all cases gave on 1, 3 and 4 ranks. A single rank of the managed loop does not use DDP."""
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("case", matrix.CASES)
def test_the_same_bits_at_any_number_of_ranks(outcomes: Matrix, case: str, ranks: int) -> None:
    assert outcomes[ranks][case] == outcomes[1][case]


def test_ddp_false_has_the_same_bits(tmp_path: Path) -> None:
    options = {**matrix.options_of("everything at once"), "num_epochs": 1, "launcher": "local", "procs": 1}
    with_ddp, without = (Trainer(**options, ddp=ddp, run_dir=tmp_path / str(ddp)).start() for ddp in (True, False))
    assert (without.weights_sha256, without.history) == (with_ddp.weights_sha256, with_ddp.history)


@pytest.mark.parametrize("case", ["everything at once", "AdamW, sharded", "own loop"])
def test_eight_lanes_give_the_same_bits_on_one_to_eight_ranks(tmp_path: Path, case: str) -> None:
    options = {**matrix.options_of(case), "lanes": 8, "batch_size": 3, "num_epochs": 1, "launcher": "local"}
    alone, *others = (
        Trainer(**options, procs=procs, run_dir=tmp_path / str(procs)).start() for procs in (1, 2, 3, 5, 6, 7, 8)
    )
    for other in others:
        assert other.weights_sha256 == alone.weights_sha256
        assert other.optimizer_sha256 == alone.optimizer_sha256
        assert other.history == alone.history


def test_two_lanes_have_the_bits_of_one_rank_on_two_with_a_sharded_optimizer(tmp_path: Path) -> None:
    """They are summed as floating-point numbers."""
    options = {**matrix.options_of("AdamW, sharded"), "lanes": 2, "batch_size": 6, "num_epochs": 1, "launcher": "local"}
    alone, two = (Trainer(**options, procs=procs, run_dir=tmp_path / str(procs)).start() for procs in (1, 2))
    assert two.weights_sha256 == alone.weights_sha256
    assert two.optimizer_sha256 == alone.optimizer_sha256
    assert two.history == alone.history


def test_seventeen_lanes_give_the_same_bits_on_one_rank_and_on_sixteen(tmp_path: Path) -> None:
    options = {**matrix.options_of("AdamW"), "lanes": 17, "batch_size": 1, "num_epochs": 2, "launcher": "local"}
    alone, many = (Trainer(**options, procs=procs, run_dir=tmp_path / str(procs)).start() for procs in (1, 16))
    assert many.weights_sha256 == alone.weights_sha256
    assert many.optimizer_sha256 == alone.optimizer_sha256
    assert many.history == alone.history


def test_cases_differ_from_each_other(outcomes: Matrix) -> None:
    """A hash that ignored what a case changes would make the test above worthless."""
    hashes = [outcome["weights"] for case, outcome in outcomes[1].items()]
    # Workers, buckets and sharding change nothing, nor does evaluating: these pairs are equal, all others are not.
    # A step_fn that computes what a loss_fn computes gives the same weights.
    assert len(set(hashes)) == len(hashes) - 3 - 1 - 1 - 2 - 2
    first = outcomes[1]
    assert first["augmentation without workers"]["weights"] == first["augmentation with two workers"]["weights"]
    assert first["iterable"]["weights"] == first["iterable with two workers"]["weights"]
    assert first["small buckets"]["weights"] == first["convolution, BatchNorm and dropout"]["weights"]
    assert first["no evaluation in between"]["weights"] == first["convolution, BatchNorm and dropout"]["weights"]
    assert first["average of the weights"]["weights"] == first["convolution, BatchNorm and dropout"]["weights"]
    by_step, by_loss = "a step with a loss outside the model", "a loss with a buffer"
    assert first[by_step]["weights"] == first[by_loss]["weights"]
    assert [row["val_loss"] for row in first[by_step]["history"]] == [
        row["val_loss"] for row in first[by_loss]["history"]
    ]
    by_step = "a step with sum and count, and parameters that some lanes use"
    assert first[by_step] == first["iterable with uneven lanes, and parameters that some use"]
    four = outcomes[4]  # where there is something to shard
    assert four["AdamW, sharded"] == first["samples that are not finite"]
    assert four["Muon, sharded"] == first["Muon"]


def test_the_first_steps_are_those_of_a_plain_loop(outcomes: Matrix) -> None:
    """A loop written here, without lanes, DDP or any of our loaders, to rounding."""
    data, seed = matrix.Images(), 0
    seed_generators(seed, "model")
    model = matrix.Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.from_numpy(indices_at(seed=seed, epoch=0, size=len(data), positions=range(len(data))))
    losses = []
    for chosen in order.split(matrix.LANES * matrix.BATCH):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.images[chosen]), data.labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 4
    assert outcomes[4]["a shared parameter"]["losses"][:4] == pytest.approx(losses, rel=1e-5)


def start(case: str, **options: Any) -> Any:
    return Trainer(**{**matrix.options_of(case), **options}).start()


def test_plain_all_reduce_agrees_to_rounding() -> None:
    loose, exact = start("AdamW", procs=4, exact=False), start("AdamW", procs=1)
    torch.testing.assert_close(
        dict(loose.load_model().state_dict()), dict(exact.load_model().state_dict()), rtol=1e-3, atol=1e-5
    )


def test_a_replica_that_drifts_stops_the_run_and_is_named() -> None:
    class Drifting(torch.nn.Linear):
        """Changes its own bias on rank 1 in the seventh forward pass."""

        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            if self.calls == 7 and torch.distributed.get_rank() == 1:
                self.bias.data[0] += 1e-6
            return super().forward(x.flatten(1))

    with pytest.raises(RankFailed, match=r"after step 8 the weights of rank 1 differ from rank 0's, first in bias"):
        start("AdamW", model_fn=lambda: Drifting(36, 2), lanes=2, procs=2, check_replicas_every=4)
