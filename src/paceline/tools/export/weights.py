"""The weights alone, as safetensors; they need the code of the model."""

from __future__ import annotations

import safetensors.torch

from paceline.checkpoint.state import split_aliases
from paceline.checkpoint.weights import save_weights
from paceline.engine.digest import sha256_of
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.run.tensor_files import can_hold
from paceline.tools.export import card
from paceline.tools.export.task import SIZES, Task


def write_safetensors(task: Task) -> str:
    """`weights.safetensors`, equal to the model bit by bit; outputs are compared too if there are samples."""
    path, config = task.folder / "weights.safetensors", task.run.config
    values, twins = split_aliases(task.run.model.state_dict())
    if others := [name for name, value in values.items() if not can_hold(value)]:
        raise PacelineError(f"safetensors has no words for {others[0]} in the model's state; use format torch")
    save_weights(task.run.model, path)
    fresh = config.function("model_fn")(**config.model_args)  # as the code on the card does it
    try:
        if twins:
            safetensors.torch.load_model(fresh, path)
        else:
            fresh.load_state_dict(safetensors.torch.load_file(path))
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise PacelineError(f"a new model of model_fn does not take them ({problem}); use format torch") from None
    if sha256_of(fresh.state_dict()) != sha256_of(task.run.model.state_dict()):
        raise PacelineError("the weights that were read again differ from the model's; nothing was exported")
    task.notes.append("Read again into a new model: every weight is equal, bit by bit.")
    if reason := _why_no_samples(task):
        task.notes.append(f"Outputs were not compared: {reason}.")
    else:
        task.compare(fresh.eval(), SIZES, is_normalized=True)
    task.tell_of_images()
    return card.loading_weights(config, is_tied=bool(twins))


def _why_no_samples(task: Task) -> str | None:
    """Why outputs cannot be compared; None if they can."""
    if task.run.config.train_fn is not None:
        return "only the loop of the run (train_fn) knows how its model is called"
    try:
        return None if task.batch is not None else "there are none"
    except (ConfigError, DataError) as error:
        return str(error)
