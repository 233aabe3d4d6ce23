"""Models, data and settings that several unit tests share."""

from __future__ import annotations

from paceline.config import Config, Settings


def settings_of(config: Config, **decided: object) -> Settings:
    """What a config means for a single rank on the CPU."""
    precision = "fp32" if config.precision == "auto" else config.precision
    usual = {"lanes": config.lanes or 1, "precision": precision, "channels_last": config.channels_last is True}
    return Settings.of(config, **{**usual, **decided})
