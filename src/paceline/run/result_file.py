"""`result.json`, which a run writes at its end: its fields, and the function that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

from paceline.errors import ConfigError

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e15)]


@with_config(ConfigDict(strict=True, extra="allow"))
class EpochRow(TypedDict):
    """The metrics of one epoch; each metric is an additional field."""

    epoch: Count
    step: Count
    train_loss: NotRequired[float | None]


class ResultFile(BaseModel):
    """The content of `result.json`; `Result` has attributes of the same names."""

    model_config = ConfigDict(strict=True, frozen=True)

    step: Count
    metrics: dict[str, float]
    weights_sha256: str
    ema_sha256: str | None
    optimizer_sha256: str | None = None
    history: list[EpochRow] = []
    epoch: Count = 0
    world_size: Count = 1
    lanes: Count = 1
    seconds: Seconds = 0.0
    samples: Count = 0
    versions: dict[str, str] = {}


def read_result(path: Path) -> ResultFile | None:
    """Read a `result.json`; None if there is no such file. Raises ConfigError if it is damaged."""
    try:
        return ResultFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; make it readable, or remove it") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path} is damaged ({f'{where}: ' if where else ''}{first['msg']}); remove it, and the run "
            "counts as unfinished"
        ) from None
