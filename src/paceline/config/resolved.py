"""The settings of a run: its config with everything decided that was left open."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from paceline.config.schema import Config


class Settings(Config):
    """A config in which nothing is None or "auto" that a rank must know; built once in each rank, never changed."""

    model_config = ConfigDict(frozen=True)

    lanes: int
    precision: Literal["fp32", "bf16", "fp16"]
    channels_last: bool

    @classmethod
    def of(cls, config: Config, **decided: Any) -> Settings:
        """The settings of a config that was checked already, with what was decided."""
        return cls.model_construct(**{**config.__dict__, **decided})
