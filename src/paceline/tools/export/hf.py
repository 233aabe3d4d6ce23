"""The format of Hugging Face: the files of `save_pretrained`, with a tokenizer and label names if available."""

from __future__ import annotations

import sys
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.tools.export.task import BATCH_SIZES, ExportTask


def write_hf(task: ExportTask) -> str:
    """Write the model with its `save_pretrained`; returns the code that loads it with `from_pretrained`."""
    model = task.run.load_model()
    pretrained: Any = model if hasattr(model, "save_pretrained") else getattr(model, "model", None)
    if not hasattr(pretrained, "save_pretrained"):
        raise ConfigError(
            f"format=hf needs a model with save_pretrained, or a wrapper with the attribute model; model_fn returned a "
            f"{type(model).__name__}; use format safetensors, torch or onnx"
        )
    _name_labels(pretrained, task.dataset)
    pretrained.save_pretrained(task.folder)
    _save_tokenizer(task, model)
    kind: Any = type(pretrained)
    is_adapter = hasattr(pretrained, "peft_config")
    loaded = (_with_adapter(task, kind) if is_adapter else kind.from_pretrained(task.folder)).eval()
    if pretrained is model:
        model = loaded
    else:
        model.model = loaded
        task.notes.append(f"This is the attribute `model` of the trained model, a {type(model).__name__}.")
    task.compare(model, BATCH_SIZES, is_normalized=True)
    task.note_normalization()
    if is_adapter:
        task.notes.append("These are the weights of the adapter; the base model is not included.")
        return (
            f"from {_module_of(kind)} import {kind.__name__}\n"
            "base = …  # the base model, in evaluation mode\n"
            f'model = {kind.__name__}.from_pretrained(base, ".")'
        )
    return f'from {_module_of(kind)} import {kind.__name__}\nmodel = {kind.__name__}.from_pretrained(".")\nmodel.eval()'


def _with_adapter(task: ExportTask, kind: Any) -> Any:
    """The model of the run with the adapter that was written, instead of its own."""
    model: Any = task.run.load_model()
    trained = model if hasattr(model, "peft_config") else model.model
    return kind.from_pretrained(trained.unload(), task.folder)


def _name_labels(pretrained: Any, dataset: Any) -> None:
    """Copy the class names of the data set, its `classes` or `label_names`, to the model's config."""
    names = getattr(dataset, "classes", None) or getattr(dataset, "label_names", None)
    config: Any = getattr(pretrained, "config", None)
    if names and len(getattr(config, "id2label", None) or ()) == len(names):
        config.id2label = dict(enumerate(map(str, names)))
        config.label2id = {str(name): place for place, name in enumerate(names)}


def _save_tokenizer(task: ExportTask, model: torch.nn.Module) -> None:
    """Save the tokenizer of the model or of the data set, if there is one."""
    for owner in (model, task.dataset):
        tokenizer: Any = getattr(owner, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(task.folder)
            return


def _module_of(kind: type) -> str:
    """The module to import a class from: its top-level package if the class is there, else its own module."""
    package = kind.__module__.partition(".")[0]
    return package if hasattr(sys.modules.get(package), kind.__name__) else kind.__module__
