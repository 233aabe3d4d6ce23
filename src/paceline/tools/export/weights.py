"""The format safetensors: only the weights, which need the code of the model."""

from __future__ import annotations

import safetensors.torch

from paceline.checkpoint.weights import save_weights
from paceline.engine.digest import sha256_of
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.run.tensor_files import can_hold
from paceline.tools.export import card
from paceline.tools.export.task import BATCH_SIZES, ExportTask


def write_safetensors(task: ExportTask) -> str:
    """Write `weights.safetensors` and compare it bit by bit; compare outputs too if there are samples."""
    path, config = task.folder / "weights.safetensors", task.run.config
    if others := [name for name, value in task.run.model.state_dict().items() if not can_hold(value)]:
        raise PacelineError(f"safetensors cannot store {others[0]} of the model's state; use format torch")
    weights_sha256 = save_weights(task.run.model, path)
    with safetensors.safe_open(path, "pt") as file:
        is_tied = bool(file.metadata())  # lists the further names of tensors with several names
    fresh = config.function("model_fn")(**config.model_args)  # as in the code of the card
    try:
        if is_tied:
            safetensors.torch.load_model(fresh, path)
        else:
            fresh.load_state_dict(safetensors.torch.load_file(path))
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise PacelineError(
            f"the weights cannot be loaded into a new model of model_fn ({problem}); use format torch"
        ) from None
    if sha256_of(fresh.state_dict()) != weights_sha256:
        raise PacelineError("the weights that were read back differ from the model's; nothing was exported")
    task.notes.append("Verified after loading into a new model: all weights are bitwise identical.")
    if reason := _why_no_samples(task):
        task.notes.append(f"Outputs were not compared: {reason}.")
    else:
        task.compare(fresh.eval(), BATCH_SIZES, is_normalized=True)
    task.note_normalization()
    return card.loading_weights(config, is_tied=is_tied)


def _why_no_samples(task: ExportTask) -> str | None:
    """The reason why outputs cannot be compared; None if they can."""
    if task.run.config.train_fn is not None:
        return "only the run's own loop (train_fn) defines how the model is called"
    try:
        if task.run.config.step_fn is not None:  # it may call the model with other parts of a batch
            task.expected(task.batch)
        return None if task.batch is not None else "there are no samples"
    except (ConfigError, DataError) as error:
        return str(error)
    except PacelineError:
        return "only step_fn defines how the model is called"
