"""Keys that are typed as options."""

from __future__ import annotations

import pytest

from paceline import cli
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "key"), [("--lr", "optimizer.lr"), ("--batch-size=4", "batch_size"), ("--max_epochs", "num_epochs")]
)
def test_a_key_that_is_typed_as_an_option_is_answered_with_the_key(option: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.app(["train", "digits", option], standalone_mode=False)
    assert str(caught.value) == f"{option.partition('=')[0]} is not an option but a key; write {key}=…, without dashes"


@pytest.mark.parametrize(("option", "example"), [("--resume", "auto"), ("--procs", "2")])
def test_an_option_without_a_value_is_answered_with_one(option: str, example: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.app(["train", "digits", option], standalone_mode=False)
    assert str(caught.value) == f"{option} has no value; write for instance {option} {example}"


@pytest.mark.parametrize("words", [["train", "digits", "--prcs", "2"], ["watch", "--lr"]])
def test_any_other_unknown_option_is_reported_with_similar_ones(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(words)
    assert caught.value.code == 2
    assert f"No such option: {next(word for word in words if word[0] == '-')}" in capsys.readouterr().err
