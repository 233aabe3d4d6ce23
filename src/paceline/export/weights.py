"""The weights alone, as safetensors; they need the code of the model."""

from __future__ import annotations

from paceline.digest import sha256_of
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.export import card
from paceline.export.task import SIZES, Task
from paceline.result import load_weights, save_weights


def write_safetensors(task: Task) -> str:
    """`weights.safetensors`, equal to the model bit by bit; outputs are compared too if there are samples."""
    path = task.folder / "weights.safetensors"
    save_weights(task.run.model, path)
    config = task.run.config
    fresh = config.function("model_fn")(**config.model_args)  # as the code on the card does it
    load_weights(fresh, path)
    if sha256_of(fresh.state_dict()) != sha256_of(task.run.model.state_dict()):
        raise PacelineError("the weights that were read again differ from the model's; nothing was exported")
    task.notes.append("Read again into a new model: every weight is equal, bit by bit.")
    if reason := _why_no_samples(task):
        task.notes.append(f"Outputs were not compared: {reason}.")
    else:
        task.compare(fresh.eval(), SIZES, is_normalized=True)
    task.tell_of_images()
    return card.loading_weights(task.run.config)


def _why_no_samples(task: Task) -> str | None:
    """Why outputs cannot be compared; None if they can."""
    if task.run.config.train_fn is not None:
        return "only the loop of the run (train_fn) knows how its model is called"
    try:
        return None if task.batch is not None else "there are none"
    except (ConfigError, DataError) as error:
        return str(error)
