from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.run.result_file import read_result

FACTS: dict[str, Any] = {"step": 6, "metrics": {"val_loss": 0.25}, "weights_sha256": "ab", "ema_sha256": None}
ADVICE = "remove it, and the run counts as unfinished"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_without_a_file_there_is_no_result(path: Path) -> None:
    assert read_result(path) is None


def test_the_result_of_a_run_is_read(path: Path) -> None:
    path.write_text(json.dumps({**FACTS, "history": [{"epoch": 0, "step": 6, "val_loss": 0.25}], "added": 1}))
    facts = read_result(path)
    assert facts is not None
    assert (facts.step, facts.metrics, facts.ema_sha256) == (6, {"val_loss": 0.25}, None)
    assert facts.history == [{"epoch": 0, "step": 6, "val_loss": 0.25}]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
        (json.dumps({**FACTS, "step": "6"}), "step: Input should be a valid integer"),
        (json.dumps({**FACTS, "metrics": [1]}), "metrics: Input should be an object"),
        (json.dumps({"step": 6, "metrics": {}, "weights_sha256": "ab"}), "ema_sha256: Field required"),
        (json.dumps({**FACTS, "history": [{"epoch": 0}]}), "history.0.step: Field required"),
    ],
)
def test_a_damaged_result_is_reported_in_one_sentence(path: Path, content: str, fault: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_result(path)
    assert caught.value.problems == [f"{path} is damaged ({fault}); {ADVICE}"]
