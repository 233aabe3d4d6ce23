"""The recipe `lm`: windows of bytes, a causal model, and generated text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.arguments import find_config
from paceline.config import Config, build, read_yaml
from paceline.engine.losses import sum_and_count
from paceline.errors import ConfigError, DataError

SMALL = {"width": 16, "depth": 2, "heads": 2, "context": 8}


@pytest.fixture
def config() -> Config:
    path = find_config("lm")
    return build(read_yaml(path), folder=path.parent)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)))
    return path


def test_training_has_every_window_of_the_first_part_and_validation_each_byte_once(config: Config, text: Path) -> None:
    training = config.function("dataset_fn")(path=text, context=4)
    assert len(training) == 90 - 4
    assert [row.tolist() for row in training[3]] == [[3, 4, 5, 6], [4, 5, 6, 7]]
    validation = config.function("val_dataset_fn")()
    assert [row[0].tolist() for row in validation] == [[90, 91, 92, 93], [94, 95, 96, 97]]
    assert max(int(following.max()) for _, following in training) == 89
    assert training.tensors[0].untyped_storage().nbytes() == 100  # views of the text


def test_the_text_is_read_from_the_home(config: Config, text: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    make = config.function("dataset_fn")
    path = tmp_path / "datasets" / "tinyshakespeare" / "input.txt"
    with pytest.raises(DataError, match=f"{path} does not exist; run: paceline data get tinyshakespeare, or give"):
        make()
    path.parent.mkdir(parents=True)
    text.rename(path)
    assert len(make()) == 90 - 64
    with pytest.raises(DataError, match=r"too short for windows of 90 bytes; lower dataset_args\.context"):
        make(context=90)


def test_logits_do_not_depend_on_later_bytes(config: Config) -> None:
    model = config.function("model_fn")(**SMALL)
    text = torch.randint(256, (2, 8), dtype=torch.uint8)
    other = text.clone()
    other[:, 5:] += 1
    with torch.no_grad():
        scores, changed = model(text), model(other)
    assert scores.shape == (2, 8, 256)
    torch.testing.assert_close(scores[:, :5], changed[:, :5])
    assert not torch.allclose(scores[:, 5:], changed[:, 5:])
    with pytest.raises(ConfigError, match=r"dataset_args\.context=9 is longer than model_args\.context=8"):
        model(torch.zeros(2, 9, dtype=torch.uint8))


def test_the_default_model_is_small_enough_for_two_cores(config: Config) -> None:
    model = config.function("model_fn")(**config.model_args)
    assert sum(parameter.numel() for parameter in model.parameters()) == 862_464
    assert config.model_args["context"] == config.dataset_args["context"]


def test_the_loss_weighs_every_byte_equally(config: Config) -> None:
    loss_fn: Any = config.function("loss_fn")
    scores, following = torch.randn(3, 8, 256), torch.randint(256, (3, 8), dtype=torch.uint8)
    total, count = sum_and_count(loss_fn(scores, following), 3, "loss_fn")
    assert count == 24
    expected = torch.nn.functional.cross_entropy(scores.reshape(24, 256), following.reshape(24).long())
    torch.testing.assert_close(total / count, expected)


def test_text_is_generated_from_the_predictions_of_the_model(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = config.function("model_fn")(**SMALL)
    lengths = []

    def predict_the_next_letter(text: torch.Tensor) -> torch.Tensor:
        lengths.append(text.shape[1])
        return torch.nn.functional.one_hot(text + 1, 256) * 10.0

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", predict_the_next_letter)
        assert model.generate("abc", length=10, temperature=0.1) == "abcdefghijklm"
        assert lengths == [3, 4, 5, 6, 7, 8, 8, 8, 8, 8]  # never longer than its context
    texts = [model.generate("a", length=9, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
