"""Warnings about settings that are allowed, but probably not meant."""

from __future__ import annotations

from typing import Any

from paceline.worker.build import suspicious_settings


def test_suspicious_settings_are_reported(make_config: Any) -> None:
    [warning] = suspicious_settings(make_config(max_steps=1000), 5)
    assert warning == "max_steps=1000 is never reached: num_epochs=1 ends the run after 5 steps; raise num_epochs"
    [warning] = suspicious_settings(make_config(ema=0.999), 100)
    assert warning.startswith("ema=0.999 is slow for 100 steps: 90% of the average will be the initial weights")
    assert warning.endswith("use ema: 0.9")
    assert suspicious_settings(make_config(ema=0.99999), 50_000)[0].endswith("use ema: 0.9998")
    for usual in ({"max_steps": 5}, {"ema": 0.9}, {"ema": 0.999}):
        assert suspicious_settings(make_config(**usual), 5 if "max_steps" in usual else 10_000) == []
    assert suspicious_settings(make_config(max_steps=1000, ema=0.999), None) == []
    assert suspicious_settings(make_config(ema=0.999), 20) == []  # a trial
