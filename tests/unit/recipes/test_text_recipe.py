"""The recipe `text`: sentences are tokenized once, each batch is padded alone, and the model classifies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.arguments import find_config
from paceline.config import Config, build, read_yaml
from paceline.errors import ConfigError, DataError, MissingExtra

TRAIN = "sentence\tlabel\na good film \t1\na bad \t0\nvery very very very very very bad\t0\n"
DEV = 'sentence\tlabel\n"good film\t1\n'  # the quote is part of the text


@pytest.fixture
def config() -> Config:
    path = find_config("text")
    return build(read_yaml(path), folder=path.parent)


@pytest.fixture
def make(config: Config, tiny_encoder: str, tmp_path: Path) -> Callable[..., Any]:
    """A function that makes the training data set, by default from SST-2's files."""
    folder = tmp_path / "home" / "datasets" / "sst2"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text(TRAIN)
    (folder / "dev.tsv").write_text(DEV)
    return lambda *tables, **options: config.function("dataset_fn")(*tables, **{"model": tiny_encoder, **options})


def test_a_sample_has_tokens_and_a_class(make, config: Config) -> None:
    dataset = make()
    assert len(dataset) == 3
    assert {key: value.tolist() for key, value in dataset[0].items()} == {"input_ids": [2, 8, 4, 6, 3], "labels": 1}
    assert dataset[2]["input_ids"].tolist() == [2, 7, 7, 7, 7, 7, 7, 5, 3]
    assert dataset.classes == ["negative", "positive"]
    dev = config.function("val_dataset_fn")()  # with the options of the training data
    assert {key: value.tolist() for key, value in dev[0].items()} == {"input_ids": [2, 1, 4, 6, 3], "labels": 1}
    assert make(max_length=4)[2]["input_ids"].tolist() == [2, 7, 3]  # leaves one position for padding


def test_a_text_is_tokenized_once(make, tmp_path: Path) -> None:
    first = make()

    def cached_files() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "home" / "cache").glob("*.safetensors")}

    before = cached_files()
    assert len(before) == 1
    assert make().tokens.equal(first.tokens)
    assert cached_files() == before
    make(max_length=4)
    assert len(cached_files()) == 2


def test_a_batch_is_about_as_long_as_its_longest_sentence(make) -> None:
    dataset = make()
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[2, 8, 4, 6, 3] + [0] * 11, [2, 8, 5, 3] + [0] * 12]
    assert batch["attention_mask"].sum(1).tolist() == [5, 4]
    assert batch["labels"].tolist() == [1, 0]
    long = {"input_ids": torch.arange(16), "labels": torch.tensor(1)}
    assert dataset.collate_fn([dataset[0], long])["input_ids"].shape == (2, 32)


def test_a_batch_has_some_padding_and_at_most_max_length_tokens(make) -> None:
    dataset = make(max_length=6)
    assert max(len(dataset[index]["input_ids"]) for index in range(len(dataset))) == 5
    batch = dataset.collate_fn([dataset[0], dataset[2]])
    assert batch["input_ids"].shape == (2, 6)
    assert not batch["attention_mask"].all()


def test_a_table_has_classes_by_name_or_number_or_none_for_predictions(make, capsys) -> None:
    table = {"body": ["good", "bad", "film"], "kind": ["spam", 0, "1"]}
    dataset = make(table, text="body", label="kind", classes=["ham", "spam"])
    assert dataset.labels.tolist() == [1, 0, 1]
    dataset = make({"sentence": ["good"]})
    assert set(dataset.collate_fn([dataset[0]])) == {"input_ids", "attention_mask"}
    assert "no column label (dataset_args.label): it can be used for predictions only" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"2 is not one of the classes \['negative', 'positive'\]; list all in"):
        make({"sentence": ["good"], "label": [2]})
    with pytest.raises(DataError, match=r"has no column sentence; name the column of texts in dataset_args\.text"):
        make({"body": ["good"]})


def test_names_of_classes_that_are_numbers_count_as_names(make, config: Config, tiny_encoder: str) -> None:
    dataset = make({"sentence": ["good", "bad"], "label": [1, 0]}, classes=[1, 0])
    assert dataset.labels.tolist() == [0, 1]
    assert config.function("model_fn")(model=tiny_encoder, classes=[1, 0]).model.config.id2label == {0: "1", 1: "0"}


def test_a_table_is_not_validated_on_the_sentences_of_sst2(make, config: Config) -> None:
    table = {"sentence": ["good"], "label": [1]}
    make(table)
    make_dev = config.function("val_dataset_fn")
    with pytest.raises(DataError, match="df is given without validation data; set val_df, or set val_dataset_fn=null"):
        make_dev()
    assert len(make_dev(table)) == 1
    make()
    assert len(make_dev()) == 1


def test_missing_files_and_models_are_named(make, config: Config, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/train.tsv does not exist; run: paceline data get sst2 --to"):
        make(root=tmp_path)
    with pytest.raises(DataError, match=r"^lab/gone cannot be loaded \(.*\); run: paceline model get lab/gone$"):
        make(model="lab/gone")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"the recipe text needs transformers; run: pip install 'paceline\[hf\]'"):
        make()


def test_the_model_returns_logits_and_has_the_names_of_the_classes(make, config: Config, tiny_encoder: str) -> None:
    dataset = make()
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    del batch["labels"]
    model: Any = config.function("model_fn")(model=tiny_encoder, classes=["no", "yes", "maybe"])
    assert model(**batch).shape == (2, 3)
    assert model.model.config.id2label == {0: "no", 1: "yes", 2: "maybe"}


def test_some_words_of_longer_texts_are_masked_in_training(make, config: Config, tiny_encoder: str) -> None:
    dataset = make()
    batch = dataset.collate_fn([dataset[index] for index in (0, 2)] * 50)
    del batch["labels"]
    model: Any = config.function("model_fn")(model=tiny_encoder)
    seen = []
    model.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    torch.manual_seed(0)
    model.train()(**batch)
    model.eval()(**batch)
    training, evaluation = (each["input_ids"] for each in seen)
    assert torch.equal(evaluation, batch["input_ids"])
    changed = training != evaluation
    assert set(training[changed].tolist()) == {9}  # [MASK]
    assert not changed[::2].any()  # three words are too few
    assert not changed[:, [0, *range(8, 16)]].any()  # special tokens and padding
    assert 0.05 < changed[1::2, 1:8].double().mean() < 0.15
    assert all(torch.equal(each["attention_mask"], batch["attention_mask"]) for each in seen)
    assert torch.equal(
        config.function("model_fn")(model=tiny_encoder, masked=0).train().with_masks(evaluation), evaluation
    )


def test_word_embeddings_are_frozen_unless_learns_embeddings(make, config: Config, tiny_encoder: str) -> None:
    make()
    make_model = config.function("model_fn")
    names = [
        name for name, parameter in make_model(model=tiny_encoder).named_parameters() if not parameter.requires_grad
    ]
    assert names == ["model.bert.embeddings.word_embeddings.weight"]
    assert all(each.requires_grad for each in make_model(model=tiny_encoder, learns_embeddings=True).parameters())


def test_in_a_rank_model_args_that_differ_from_dataset_args_are_refused(
    make, config: Config, tiny_encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    make_model = config.function("model_fn")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(
        ConfigError, match=r"model_args.model=other differs from dataset_args.model=lab/tiny; make them equal"
    ):
        make_model(model="other")
    with pytest.raises(
        ConfigError, match=r"model_args.classes=\['a'\] differs from dataset_args.classes=\('negative', 'posit"
    ):
        make_model(model=tiny_encoder, classes=["a"])
    make_model(model=tiny_encoder, classes=["negative", "positive"])
