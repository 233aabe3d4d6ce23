"""Numbers that are not finite, on real ranks: one decision, one warning, one hash."""

from __future__ import annotations

import re
from typing import Any

import exactness_cases as matrix
import pytest
import torch
from torch import nn

from paceline import Trainer
from paceline.errors import RankFailed
from support.runs import events_of, warnings_in

BAD = matrix.BAD


def start(case: str, **options: Any) -> Any:
    return Trainer(**{**matrix.options_of(case), **options}).start()


@pytest.mark.parametrize("procs", [1, 2])
def test_a_bad_sample_costs_its_steps_and_nothing_else(procs: int) -> None:
    result = start("samples that are not finite", procs=procs, log={"every_steps": 1, "digests": True}, num_epochs=2)
    digests = [event["digests"] for event in events_of(result.run_dir, "digests")]
    losses = [event["loss"] for event in events_of(result.run_dir, "step")]
    unchanged = [step + 1 for step in range(1, len(digests)) if digests[step] == digests[step - 1]]
    without_loss = [step + 1 for step, loss in enumerate(losses) if loss is None]
    warned = [int(re.match(r"step (\d+) is skipped", text)[1]) for text in warnings_in(result.run_dir)]
    assert len(warned) == 4  # two bad samples, two epochs: one warning a step, however many ranks there are
    assert warned == without_loss
    assert unchanged == [step for step in warned if step > 1]
    for text in warnings_in(result.run_dir):
        rank, lane, samples = re.search(r"rank (\d), lane (\d): loss nan, samples ([\d, ]+)", text).groups()
        assert int(rank) == int(lane) * procs // matrix.LANES
        assert set(map(int, samples.split(", "))) & set(BAD)
    assert "NaN" not in (result.run_dir / "result.json").read_text()
    good = [loss for loss in losses[:4] if loss is not None]
    assert result.history[0]["train_loss"] == pytest.approx(sum(good) / len(good))
    assert result.load_model()[1].running_mean.isfinite().all()


def test_samples_of_a_split_are_named_by_their_index_in_the_whole_data_set() -> None:
    # Without BatchNorm, and with one sample a lane, exactly the bad one is named.
    result = start(
        "samples that are not finite", model_fn=matrix.layer_net, procs=2, lanes=2, batch_size=1, num_epochs=1,
        val_dataset_fn=None, val_fraction=0.1, optimizer=matrix.SGD,
    )  # fmt: skip
    named = {int(index) for text in warnings_in(result.run_dir) for index in re.findall(r"samples (\d+)", text)}
    assert named <= set(BAD)
    assert named


@pytest.mark.parametrize("unused", [False, True])
def test_a_loss_whose_gradients_hide_it_is_skipped_by_all_ranks(unused: bool) -> None:
    """clamp's gradient is zero for NaN: only the NaN flag of the rank with the loss reaches the others."""

    class Missing(matrix.Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.images[index], torch.tensor(torch.nan if index in BAD else 1.0)

    def clamped(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - target).clamp(-9, 9).square().mean()

    options: dict[str, Any] = {
        "dataset_fn": Missing, "val_dataset_fn": None, "val_fraction": 0, "loss_fn": clamped, "metrics": [],
        "num_epochs": 1, "find_unused_parameters": unused,
    }  # fmt: skip
    one, two = (start("average of the weights", procs=procs, **options) for procs in (1, 2))
    assert len(warnings_in(two.run_dir)) == len(warnings_in(one.run_dir)) == 2
    assert one.weights_sha256 == two.weights_sha256
    assert one.history == two.history


def test_infinite_gradients_of_finite_losses_are_traced_to_rank_and_samples() -> None:
    result = start("gradients that are not finite", procs=2, num_epochs=1)
    found = [
        re.search(r"rank \d, lane \d: gradients, samples ([\d, ]+)$", text) for text in warnings_in(result.run_dir)
    ]
    assert [len(set(map(int, match[1].split(", "))) & set(BAD)) for match in found] == [1, 1]


def test_stop_ends_the_run_with_a_reason() -> None:
    with pytest.raises(
        RankFailed, match=r"NotFinite: nan=stop and step \d is not finite: rank \d, lane \d: loss nan, "
    ):
        start("samples that are not finite", procs=2, nan="stop")


def test_a_run_that_cannot_recover_ends_after_nan_limit_steps() -> None:
    class Hopeless(matrix.Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.images[index] * torch.nan, self.labels[index]

    with pytest.raises(RankFailed, match=r"nan_limit=5 steps in a row were not finite, the last was step 5: rank 0"):
        start("AdamW", dataset_fn=Hopeless, procs=2, nan_limit=5)


def test_off_lets_numbers_that_are_not_finite_through() -> None:
    result = start("samples that are not finite", procs=2, nan="off", val_dataset_fn=None, val_fraction=0, metrics=[])
    assert result.load_model()[0].weight.isnan().all()


def test_fp16_trains_and_skips_in_silence() -> None:
    def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 100 * nn.functional.cross_entropy(output, target)

    result = start("fp16", procs=2, loss_fn=steep, optimizer={"name": "adamw", "lr": 1e-3}, log={"every_steps": 1})
    losses = [event["loss"] for event in events_of(result.run_dir, "step")]
    assert losses[0] is None  # too large for the first scale
    assert losses[-1] < next(loss for loss in losses if loss is not None)
    assert warnings_in(result.run_dir) == []
