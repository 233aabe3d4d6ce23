"""Errors of a rank whose cause is a mistake of the user, raised again as one sentence with the place and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.config import Config
from paceline.engine.diagnosis import explained
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.observe.progress import Progress
from paceline.user_code import place_of, user_location
from paceline.worker.out_of_memory import is_out_of_memory, memory_advice

HAS_PLACE = re.compile(r":\d+\)")


@contextmanager
def explaining_mistakes(config: Config, progress: Progress) -> Iterator[None]:
    """Raise known mistakes as a ConfigError, with the place in the user's code, and explain a lack of memory.

    Samples that cannot be used are such a mistake, too: the place is that of `dataset_fn`.

    A lack of memory keeps its class: it may not repeat, so the ranks may restart from a checkpoint.
    """
    try:
        yield
    except DataError as error:
        raise ConfigError(_with_place(error, user_location(error) or place_of(config.dataset_fn))) from error
    except ConfigError as error:
        sentence = _with_place(error, user_location(error))
        if type(error) is not ConfigError or len(error.problems) > 1 or sentence == str(error):
            raise
        raise ConfigError(sentence) from error
    except PacelineError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            advice = memory_advice(str(error), config, is_evaluating="evaluat" in progress.phase)
            raise type(error)(advice).with_traceback(error.__traceback__) from error
        if (explanation := explained(error, config)) is None:
            raise
        raise ConfigError(explanation) from error


def _with_place(error: PacelineError, place: str | None) -> str:
    """The text of an error with a place in the user's code, unless it has one."""
    return str(error) if place is None or HAS_PLACE.search(str(error)) else f"{error} ({place})"
