"""The recipes `cifar10` and `cifar10-fast`: where they read CIFAR-10 from, their models and configs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cli.arguments import find_config
from paceline.config import Config, build, read_yaml
from paceline.errors import DataError
from paceline.hub import catalog

FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
RECORDS = 3
SIZE = RECORDS * 3073


def config_of(name: str) -> Config:
    path = find_config(name)
    return build(read_yaml(path), folder=path.parent)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that reads the data, with files of three records each."""
    module = __import__(config_of("cifar10-fast").function("dataset_fn").__module__)
    monkeypatch.setattr(module, "folder", module.folder)
    [archive] = catalog.CIFAR10.files
    contents = tuple(replace(content, size=SIZE) for content in archive.contents)
    small = replace(catalog.CIFAR10, files=(replace(archive, contents=contents),))
    monkeypatch.setitem(catalog.ALL, "cifar10", small)
    return module


def write_files(folder: Path) -> np.ndarray:
    """Write all six files; return their records, one in each row."""
    folder.mkdir(parents=True, exist_ok=True)
    records = np.random.default_rng(0).integers(0, 256, (len(FILES) * RECORDS, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    for name, part in zip(FILES, np.split(records, len(FILES)), strict=True):
        part.tofile(folder / name)
    return records


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_images_and_classes_are_read_in_order(recipe: Any, tmp_path: Path, inner: str) -> None:
    records = write_files(tmp_path / inner)
    images, classes = recipe.get_dataset(str(tmp_path)).tensors
    test_images, test_classes = recipe.get_test_dataset().tensors
    assert (images.dtype, classes.dtype) == (torch.uint8, torch.int64)
    assert (images.shape, test_images.shape) == ((15, 3, 32, 32), (3, 3, 32, 32))
    assert torch.cat([classes, test_classes]).tolist() == records[:, 0].tolist()
    everything = torch.cat([images, test_images])
    assert np.array_equal(everything.reshape(18, 3072).numpy(), records[:, 1:])
    assert int(everything[4, 2, 31, 30]) == records[4, 1 + 2 * 1024 + 31 * 32 + 30]  # blue, last row


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_a_missing_or_damaged_file_is_named_with_its_folder(recipe: Any, tmp_path: Path, name: str) -> None:
    write_files(tmp_path)
    path = tmp_path / name

    def read_all() -> None:
        recipe.get_dataset(tmp_path)
        recipe.get_test_dataset()

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{path} contains {SIZE - 1:,} bytes, not {SIZE:,}; .* --to {tmp_path} "):
        read_all()
    path.unlink()
    with pytest.raises(DataError, match=f"/{name} does not exist; run: paceline data get .* PACELINE_HOME, "):
        read_all()


def test_the_data_is_read_from_the_home(recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = write_files(tmp_path / "shared_data" / "datasets" / "cifar10")
    monkeypatch.delenv("PACELINE_HOME", raising=False)
    assert recipe.get_test_dataset().tensors[1].tolist() == records[-RECORDS:, 0].tolist()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    with pytest.raises(DataError, match=f"{tmp_path}/home/datasets/cifar10/.* run: paceline data get cifar10 [(]"):
        recipe.get_dataset()
    (tmp_path / "shared_data").rename(tmp_path / "home")
    assert len(recipe.get_dataset()) == 5 * RECORDS


@pytest.mark.parametrize("name", ["cifar10", "cifar10-fast"])
def test_the_model_returns_ten_logits_for_each_image(name: str) -> None:
    config = config_of(name)
    assert config.name == name
    model = config.function("model_fn")(**config.model_args)
    for mode in (model.train(), model.eval()):
        assert mode(torch.randn(2, 3, 32, 32)).shape == (2, 10)


# --- cifar10-fast ---------------------------------------------------------------------------------------------------


def make_small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = config_of("cifar10-fast")
    return config.function("model_fn")(widths=[8, 16, 16]), config


def test_the_optimizer_has_every_trainable_parameter_once() -> None:
    model, config = make_small()
    groups = config.function("optimizer_fn")(model).param_groups
    optimized = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(optimized) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert [group["use_muon"] for group in groups] == [True, False, False]


def test_the_first_layer_has_orthogonal_filters_and_their_negatives() -> None:
    filters = make_small()[0].whiten.weight.detach().flatten(1)
    assert torch.equal(filters[:12], -filters[12:])
    products = filters[:12] @ filters[:12].T
    torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-3)


def test_the_evaluation_is_the_weighted_mean_over_six_views() -> None:
    model = make_small()[0].eval()
    images = torch.randn(2, 3, 32, 32)
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    weighted = [(0.5, images), (0.25, padded[:, :, 0:32, 0:32]), (0.25, padded[:, :, 2:34, 2:34])]
    with torch.no_grad():
        expected = sum(weight / 2 * (model.score(view) + model.score(view.flip(3))) for weight, view in weighted)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
        model.views = False
        torch.testing.assert_close(model(images), model.score(images))


def test_the_loss_decreases() -> None:
    model, config = make_small()
    optimizer, loss_fn = config.function("optimizer_fn")(model), config.function("loss_fn")
    images, classes = torch.randn(40, 3, 32, 32), torch.arange(40) % 4
    images[:, 0] += classes.reshape(-1, 1, 1)
    losses = []
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] *= 1 - step / 24
        loss = loss_fn(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
