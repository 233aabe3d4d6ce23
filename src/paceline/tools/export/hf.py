"""What a model of Hugging Face writes of itself, with a tokenizer and the names of labels if there are any."""

from __future__ import annotations

import sys
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.tools.export.task import SIZES, Task


def write_hf(task: Task) -> str:
    """What the model's own `save_pretrained` writes; `from_pretrained` is how it is loaded again."""
    model = task.run.load_model()
    pretrained: Any = model if hasattr(model, "save_pretrained") else getattr(model, "model", None)
    if not hasattr(pretrained, "save_pretrained"):
        raise ConfigError(
            f"format=hf needs a model with save_pretrained, or with one as its attribute model; model_fn returned a "
            f"{type(model).__name__}; use format safetensors, torch or onnx"
        )
    _name_labels(pretrained, task.dataset)
    pretrained.save_pretrained(task.folder)
    _save_tokenizer(task, model)
    kind: Any = type(pretrained)
    loaded = kind.from_pretrained(task.folder).eval()
    if pretrained is model:
        model = loaded
    else:
        model.model = loaded
        task.notes.append(f"This is the attribute `model` of what was trained, a {type(model).__name__}.")
    task.compare(model, SIZES, is_normalized=True)
    task.tell_of_images()
    return f'from {_home_of(kind)} import {kind.__name__}\nmodel = {kind.__name__}.from_pretrained(".")\nmodel.eval()'


def _name_labels(pretrained: Any, dataset: Any) -> None:
    """Give the model's config the names of classes that the data set offers as `classes` or `label_names`."""
    whole = getattr(dataset, "base", dataset)
    names = getattr(whole, "classes", None) or getattr(whole, "label_names", None)
    config: Any = getattr(pretrained, "config", None)
    if names and len(getattr(config, "id2label", None) or ()) == len(names):
        config.id2label = dict(enumerate(map(str, names)))
        config.label2id = {str(name): place for place, name in enumerate(names)}


def _save_tokenizer(task: Task, model: torch.nn.Module) -> None:
    for owner in (model, getattr(task.dataset, "base", task.dataset)):
        tokenizer: Any = getattr(owner, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(task.folder)
            return


def _home_of(kind: type) -> str:
    """The module to import a class from: its package where that offers it."""
    package = kind.__module__.partition(".")[0]
    return package if hasattr(sys.modules.get(package), kind.__name__) else kind.__module__
