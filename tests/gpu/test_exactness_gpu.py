"""One run, one hash on a GPU: NCCL alone, and several Gloo ranks that share it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_models import Remembering, Teacher, conv_net
from torch import nn

from paceline import Trainer
from paceline.errors import ConfigError, Stopped
from support.datasets import signed
from support.models import RunningLoss
from support.runs import events_of
from support.worlds import world_of


class Images(torch.utils.data.TensorDataset):
    def __init__(self) -> None:
        super().__init__(*signed(203, 3, 8, 8).tensors)


def start(procs: int, model_fn: Any = conv_net, dataset_fn: Any = Images, **changed: Any) -> Any:
    options: dict[str, Any] = {"num_epochs": 2, **changed}
    options.setdefault("loss_fn", nn.functional.cross_entropy)
    return Trainer(
        model_fn, dataset_fn, metrics=["accuracy"], batch_size=8, lanes=4,
        optimizer={"name": "adamw", "lr": 1e-2}, clip_norm=1.0, device="cuda", procs=procs, ema=0.9,
        **options,
    ).start()  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_hash_is_the_same_twice_and_on_1_2_and_4_ranks_that_share_the_gpu(precision: str) -> None:
    nccl = [start(1, precision=precision, backend="nccl") for _ in range(2)]
    gloo = [start(procs, precision=precision, backend="gloo") for procs in (1, 2, 4)]
    plain = start(1, precision=precision, ddp=False)
    hashes = {(r.weights_sha256, r.ema_sha256, r.optimizer_sha256) for r in (*nccl, *gloo, plain)}
    assert len(hashes) == 1
    assert all(result.history == nccl[0].history for result in (*gloo, plain))


def test_layers_that_read_what_they_keep_give_the_hash_on_any_number_of_ranks() -> None:
    results = [start(1, Remembering, backend="nccl"), *(start(n, Remembering, backend="gloo") for n in (2, 4))]
    assert len({(result.weights_sha256, result.ema_sha256) for result in results}) == 1


def test_a_teacher_and_a_loss_with_a_buffer_give_the_hash_on_any_number_of_ranks() -> None:
    options: dict[str, Any] = {"model_fn": Teacher, "loss_fn": RunningLoss()}
    results = [start(1, backend="nccl", **options), *(start(n, backend="gloo", **options) for n in (2, 4))]
    assert len({(result.weights_sha256, result.ema_sha256) for result in results}) == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_all_modes_skip_the_same_steps_that_are_not_finite(precision: str) -> None:
    class Spoilt(Images):
        def __init__(self) -> None:
            super().__init__()
            self.tensors[0][17] = torch.nan

    options: dict[str, Any] = {"dataset_fn": Spoilt, "precision": precision, "val_fraction": 0}
    results = [start(1, backend="nccl", **options), *(start(procs, backend="gloo", **options) for procs in (2, 4))]
    assert len({(result.weights_sha256, result.ema_sha256, result.optimizer_sha256) for result in results}) == 1
    for result in results:
        events = (result.run_dir / "events.jsonl").read_text()
        assert events.count(" is skipped, it is not finite: rank ") == 2  # once an epoch
        assert "NaN" not in events
        assert all(parameter.isfinite().all() for parameter in result.load_model().state_dict().values())


def test_a_stopped_run_resumes_with_other_ranks_to_the_same_hash(tmp_path: Path) -> None:
    log = tmp_path / "fetched"

    class Stopping(Images):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and not log.exists():
                log.touch()
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getitem__(index)

    whole = start(1, precision="bf16", backend="nccl", schedule={"name": "cosine"})
    options: dict[str, Any] = {"precision": "bf16", "schedule": {"name": "cosine"}, "run_dir": "run"}
    with pytest.raises(Stopped):
        start(1, backend="nccl", dataset_fn=Stopping, checkpoint={"every_steps": 1}, **options)
    result = start(2, backend="gloo", resume="auto", **options)
    for key in ("weights_sha256", "ema_sha256", "optimizer_sha256", "history"):
        assert getattr(result, key) == getattr(whole, key), key


def test_the_rank_that_holds_the_others_back_is_reported_with_its_phase(tmp_path: Path) -> None:
    def slow_on_rank_1() -> nn.Module:
        model = conv_net()
        model.register_forward_pre_hook(lambda *_: time.sleep(0.06 if dist.get_rank() == 1 and model.training else 0))
        return model

    result = start(2, model_fn=slow_on_rank_1, backend="gloo", val_fraction=0, num_epochs=12, run_dir=str(tmp_path))
    [late] = events_of(result.run_dir, "straggler")
    assert (late["rank"], late["phase"]) == (1, "forward")
    assert late["behind_ms"] > 50
    paces = [event for event in events_of(result.run_dir, "pace") if len(event["phase_ms"]) > 1]
    for pace in paces:  # the phases are all there is
        for rank, total in enumerate(pace["step_ms"]):
            assert sum(times[rank] for times in pace["phase_ms"].values()) == pytest.approx(total, rel=0.01, abs=0.05)


def test_the_backend_is_nccl_where_every_rank_has_a_gpu() -> None:
    def backend(*arguments: Any) -> str:
        return dist.get_backend()

    everyone = torch.cuda.device_count()
    assert Trainer(conv_net, Images, train_fn=backend, procs=everyone).start().value == "nccl"
    assert Trainer(conv_net, Images, train_fn=backend, procs=everyone + 1).start().value == "gloo"


def test_integers_are_summed_on_a_stream_of_their_own_with_nccl() -> None:
    def reduce(model: Any, train_loader: Any, val_loader: Any, device: torch.device, num_epochs: int) -> bool:
        from paceline.engine.reduce import Reduction

        # A single rank sums nothing over ranks; it says that there are two, to run what several GPUs would run.
        reduction = Reduction(world_of(size=2, device=device), 3, exact=True)
        tensor = torch.randn(1 << 20, device=device)
        reduction.start([tensor], [], tensor, is_empty=False).wait()  # on the grid, and exact from now on
        expected = tensor.clone()
        for _ in range(20):
            tensor.mul_(2)  # on the compute stream, just before
            expected.mul_(2)
            tensor = reduction.start([tensor], [], tensor, is_empty=False).wait()
        return torch.equal(tensor, expected)

    assert Trainer(conv_net, Images, train_fn=reduce, procs=1, backend="nccl").start().value


def test_attention_is_the_same_twice_and_an_operator_that_cannot_be_is_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(24, 64), nn.Linear(64, 2)
            self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.embed(x.reshape(len(x), 8, 24))).mean(1))

    hashes = {start(procs, model_fn=Attention).weights_sha256 for procs in (1, 1, 2)}
    assert len(hashes) == 1

    def pooled() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 2))

    with pytest.raises(ConfigError, match=r"exact=true but adaptive_avg_pool2d\S* cannot be repeated.*exact: false"):
        start(1, model_fn=pooled)
    assert start(1, model_fn=pooled, exact=False).step > 0
