from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.config import Config
from paceline.engine import replica
from paceline.engine.digest import digests_of, sha256_of
from paceline.engine.replica import PlainModel, accepts_channels_last, make_model, place_model, replicate
from paceline.errors import ConfigError
from paceline.world import use_tf32
from support.worlds import world_of

MakeConfig = Callable[..., Config]
CPU = torch.device("cpu")


def filters() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 2, 2), nn.Conv2d(2, 1, 1))


def test_channels_last_filters_have_the_strides_of_their_gradients(make_config: MakeConfig) -> None:
    model = place_model(filters(), make_config(channels_last=True), CPU)
    for module in model:
        expected = torch.empty(module.weight.shape, memory_format=torch.channels_last)
        assert module.weight.stride() == expected.stride()


def test_no_fingerprint_depends_on_the_layout(make_config: MakeConfig) -> None:
    rows, channels = filters(), place_model(filters(), make_config(channels_last=True), CPU)
    assert rows[0].weight.stride() != channels[0].weight.stride()
    assert sha256_of(rows.state_dict()) == sha256_of(channels.state_dict())
    assert torch.equal(digests_of(rows), digests_of(channels))


def test_by_default_a_model_on_the_cpu_stays_as_it_is(make_settings: MakeConfig) -> None:
    model = filters()
    before = [parameter.stride() for parameter in model.parameters()]
    assert [parameter.stride() for parameter in place_model(model, make_settings(), CPU).parameters()] == before


class Mapped(nn.Module):
    """Its weights are mapped from a file, at unaligned addresses, as pretrained ones are."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(np.arange(33, dtype=np.float32).tobytes())
        content = torch.from_file(str(path), shared=False, size=33)
        self.layer = nn.Linear(4, 4)
        self.layer.weight.data = torch.from_numpy(content[1:17].view(4, 4).numpy())
        self.tied, self.part = self.layer.weight, nn.Parameter(self.layer.bias.data[1:3])
        self.register_buffer("mean", torch.from_numpy(content[17:33].numpy()))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("broad", torch.ones(1).expand(3))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())


def test_a_file_that_weights_were_mapped_from_may_change(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    before = Mapped(path)
    assert all(tensor.data_ptr() % 64 for tensor in (before.layer.weight, before.mean))
    state = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    model = make_model(make_config(model_fn=Mapped, model_args={"path": path}))
    path.write_bytes(bytes(4 * 33))
    kept = ("layer.weight", "tied", "mean", "turned")
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in kept)
    assert [tensor.data_ptr() % 64 for tensor in (model.layer.weight, model.mean)] == [0, 0]


def test_weights_share_memory_as_before_and_keep_their_strides(make_config: MakeConfig, tmp_path: Path) -> None:
    model: Any = make_model(make_config(model_fn=Mapped, model_args={"path": tmp_path / "weights"}))
    assert model.tied is model.layer.weight
    model.layer.bias.data[1] = 8.0
    assert model.part[0] == 8.0
    assert model.turned.stride() == (1, 3)
    model.broad[0] = 8.0
    assert model.broad.tolist() == [8.0, 1.0, 1.0]


def test_buffers_that_share_memory_stay_so_and_expanded_ones_get_their_own(make_config: MakeConfig) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(6.0).view(3, 2))
            self.register_buffer("first", self.table[0])
            self.register_buffer("broad", torch.arange(3.0)[None].expand(4, 3))

    model: Any = make_model(make_config(model_fn=Positions))
    model.table[0, 1] = 8.0
    assert model.first.tolist() == [0.0, 8.0]
    model.broad[1] = 7.0
    assert model.broad.tolist() == [[0.0, 1.0, 2.0], [7.0] * 3, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]


def test_empty_buffers_do_not_share_memory(make_config: MakeConfig) -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.empty(0))
            self.register_buffer("high", torch.empty(0))

    model: Any = make_model(make_config(model_fn=Observer))
    model.low.resize_(2).fill_(1.0)
    model.high.resize_(2).fill_(2.0)
    assert model.low.tolist() == [1.0, 1.0]


def test_weights_elsewhere_are_left_where_they_are(make_config: MakeConfig) -> None:
    assert make_model(make_config(model_fn=lambda: nn.Linear(2, 1, device="meta"))).weight.device.type == "meta"


def test_weights_that_are_still_to_be_made_are_left_world_of(make_config: MakeConfig) -> None:
    make_model(make_config(model_fn=lambda: nn.LazyLinear(3)))


class Old(nn.Module):
    """Flattens as many examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.filters(x).view(len(x), -1)


class New(Old):
    def forward(self, x: torch.Tensor) -> Any:
        return self.filters(x).flatten(1)


def test_a_view_that_the_layout_forbids_is_found_beforehand_and_the_model_is_left_world_of() -> None:
    batch, old = (torch.randn(2, 3, 8, 8), torch.zeros(2)), Old()
    before = sha256_of(old.state_dict())
    assert not accepts_channels_last(old, batch)
    assert accepts_channels_last(New(), batch)
    assert accepts_channels_last(nn.Linear(3, 3), batch)  # fails in any layout: the first step reports it
    assert (old.calls, old.training, sha256_of(old.state_dict())) == (0, True, before)
    assert old.filters[0].weight.is_contiguous()


def test_shared_statistics_need_a_gpu(make_config: MakeConfig) -> None:
    config = make_config(sync_batchnorm=True, exact=False, ddp=False)
    with pytest.raises(ConfigError, match=r"sync_batchnorm=true but the ranks run on the CPU.*; remove it"):
        replicate(nn.BatchNorm1d(2), config, world_of())


def test_powersgd_needs_contiguous_filters(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "_in_ddp", lambda model, config, world: PlainModel(model))
    config = make_config(compression="powersgd", exact=False, channels_last=True)
    with pytest.raises(ConfigError, match=r"compression=powersgd cannot .*; set channels_last: false"):
        replicate(filters(), config, world_of(size=2))
    replicate(filters(), config, world_of(size=1))  # where nothing is sent


@pytest.fixture
def _settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("_settings")
def test_tf32_is_set_so_that_old_and_new_settings_agree() -> None:
    for wanted in (True, False):
        use_tf32(wanted)
        assert torch.backends.cuda.matmul.allow_tf32 is wanted  # raises where the two disagree, as torch.compile would
        assert torch.backends.cudnn.allow_tf32 is wanted
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is wanted
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is wanted


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0 is sparse=True, .* use sparse=False, --procs 1"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.5)), r"0 has max_norm=1\.5, which changes .* --procs 1"),
        (Complex, "weight is complex, .* use two real parameters, --procs 1"),
    ],
)
def test_gradients_that_cannot_be_added_up_across_ranks_are_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, model: Any, words: str
) -> None:
    monkeypatch.setattr(replica, "_in_ddp", lambda model, config, world: PlainModel(model))
    with pytest.raises(ConfigError, match=words):
        replicate(model(), make_config(), world_of(size=2))
    replicate(model(), make_config(), world_of(size=1))
