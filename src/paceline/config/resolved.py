"""The settings of a run: its config, with every None or "auto" that a rank needs resolved."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from paceline.config.schema import Config


class Settings(Config):
    """A config with resolved lanes, precision and memory format; built once in each rank, and frozen."""

    model_config = ConfigDict(frozen=True)

    lanes: int
    precision: Literal["fp32", "bf16", "fp16"]
    channels_last: bool

    @classmethod
    def of(cls, config: Config, **decided: Any) -> Settings:
        """The settings of a valid config, with the resolved values of some keys; nothing is validated again."""
        return cls.model_construct(**{**config.__dict__, **decided})
