"""What is wrong with a config, one sentence each: with a key, with keys that do not go together, with names."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from paceline.config.functions import name_of
from paceline.config.schema import FUNCTION_KEYS, MANAGED_KEYS, Config

# Names in the row of an epoch, and in an event, that a metric would take the place of.
TAKEN_NAMES = {"self", "event", "time", "epoch", "step", "train_loss", "val_loss"}


def describe(detail: ErrorDetails) -> str:
    """One sentence of the form `<key>=<value> <what is wrong>; <what to do>`."""
    # Unions put the branch that failed into the location; people know the key alone.
    path = [str(part) for part in detail["loc"] if isinstance(part, str) and not re.search(r"[\[(-]", part)]
    path = [p for p in path if p not in ("str", "callable", "bool")]
    if detail["type"] == "extra_forbidden":
        path = [str(part) for part in detail["loc"]]  # an unknown key may have any characters
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return f"{key} is not a known key; {_hint(path)}"
    if path[-1] in FUNCTION_KEYS:
        return f'{key}={_short(detail["input"])} is not a function; give a function, or "module:name" in a config'
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key}={_short(detail['input'])} {message[0].lower()}{message[1:]}"


def conflicts(config: Config, *, given: set[str], wrong: Collection[str] = ()) -> list[str]:
    """Mistakes that show only when keys are seen together.

    `given` are the keys that were set by the user; those in `wrong` are reported already. A key with its default says
    nothing: the config in a run folder has all of them.
    """
    given = {key for key in given & set(Config.model_fields) if not _is_default(config, key)}
    problems = []
    for key, example in (
        ("model_fn", "a function that returns the model"),
        ("dataset_fn", "the data set's class"),
    ):
        if getattr(config, key) is None and key not in wrong:
            problems.append(f"{key} is missing; give {example}")
    if config.train_fn is None and config.loss_fn is None and not {"train_fn", "loss_fn"} & set(wrong):
        problems.append(
            "train_fn and loss_fn are both missing; give train_fn (your own loop) or loss_fn (the managed loop)"
        )
    if config.train_fn is not None:
        idle = [key for key in ("loss_fn", *MANAGED_KEYS) if key in given]
        if idle:
            belong = "belongs" if len(idle) == 1 else "belong"
            problems.append(
                f"{', '.join(idle)} {belong} to the managed loop; remove train_fn, or do it inside train_fn"
            )
        if config.resume not in ("auto", "never"):
            problems.append(
                f"resume={config.resume} names a run to continue, but Paceline keeps no checkpoints for train_fn; "
                "use --resume auto to start from the beginning, or load a checkpoint of your own inside train_fn"
            )
        if inspect.isgeneratorfunction(config.train_fn) or inspect.iscoroutinefunction(config.train_fn):
            kind = "has a yield" if inspect.isgeneratorfunction(config.train_fn) else "is async"
            name = name_of(config.train_fn)
            problems.append(f"train_fn={name} {kind}, so a call of it would train nothing; use a plain function")
        if config.log.trackers:
            problems.append("log.trackers has nothing to tell of your own loop; remove it, and log inside train_fn")
    if config.optimizer_fn is not None and "optimizer" in given:
        problems.append("optimizer and optimizer_fn are both given; keep one of them")
    problems += _curriculum(config)
    for key in ("val_df", "val_dataset_fn"):
        if key in given and "val_fraction" in given:
            problems.append(f"{key} and val_fraction are both given; keep one of them")
    for name in sorted(TAKEN_NAMES.intersection(config.metrics)):
        problems.append(f"metrics.{name} has the name of something else that is told of an epoch; choose another name")
    best = config.checkpoint.best
    measured = ["val_loss", "train_loss", *config.metrics]
    if best is not None and best.metric not in measured and "metrics" not in wrong:
        problems.append(f"checkpoint.best.metric={best.metric!r} is not measured; use {', '.join(measured)}")
    if (config.nodes is None) != (config.rendezvous is None) and not {"nodes", "rendezvous"}.intersection(wrong):
        problems.append("nodes and rendezvous belong together, as in --nodes 2 --rendezvous HOST:29400; give both")
    if config.launcher == "ray" and config.nodes is not None:
        problems.append(f"nodes={config.nodes} is up to Ray with launcher=ray; remove it, procs counts all processes")
    if not config.ddp and config.nodes is not None:
        problems.append(f"nodes={config.nodes} needs DDP; remove ddp: false")
    if not config.ddp and (config.procs_range or (1, 1))[0] > 1:
        problems.append(f"procs={config.procs} needs DDP; remove ddp: false, or use --procs 1")
    problems += _inexact(config)
    if config.device == "cpu" and config.step_mode == "graph":
        problems.append("step_mode=graph needs a GPU, but device=cpu; use step_mode: auto")
    if config.device == "cpu" and config.backend == "nccl":
        problems.append("backend=nccl cannot work with device=cpu; use backend: gloo")
    return problems


def unknown_names(config: Config) -> list[str]:
    """Optimizers and metrics that do not exist. torch knows the optimizers, so this is where it is first needed."""
    from paceline.engine.losses import NAMED
    from paceline.engine.optimizers import problems_with

    problems = problems_with(config.optimizer.name, config.optimizer.model_extra or {})
    if isinstance(config.metrics, list):
        for name in config.metrics:
            if name not in NAMED:
                problems.append(f"metrics={name!r} is not known; use {', '.join(NAMED)}, or {{{name}: function}}")
    return problems


def wrong_losses(config: Config) -> list[str]:
    """Losses that would train something else than is meant."""
    import torch

    loss, problems = config.loss_fn, []
    takes_probabilities = loss is torch.nn.functional.binary_cross_entropy or isinstance(loss, torch.nn.BCELoss)
    if takes_probabilities and isinstance(config.metrics, list) and "accuracy" in config.metrics:
        problems.append(
            "metrics=accuracy takes the sign of a logit, but loss_fn=binary_cross_entropy takes probabilities; "
            "use binary_cross_entropy_with_logits, and no sigmoid in the model"
        )
    if isinstance(loss, torch.nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        problems.append(
            "loss_fn has weights of its own, which nobody would train; make them a part of the model, or freeze them: "
            "requires_grad_(False)"
        )
    return problems


def unknown_arguments(config: Config) -> list[str]:
    """Names in `model_args` and `dataset_args` that their function does not take; said only where that is certain."""
    problems = []
    for key, function in (("model_args", config.model_fn), ("dataset_args", config.dataset_fn)):
        if not callable(function) or (taken := _arguments_of(function)) is None:
            continue
        for name in [name for name in getattr(config, key) if name not in taken]:
            near = difflib.get_close_matches(str(name), taken, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(taken) or 'none'}"
            problems.append(f"{key}.{name} is not an argument of {name_of(function)}; {hint}")
    return problems


def _arguments_of(function: Callable[..., Any]) -> list[str] | None:
    """The arguments that can be given to a function by name; None where it may take any, or does not say."""
    try:  # what a decorator passes on is its own affair
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]


def _hint(path: list[str]) -> str:
    """What an unknown key may have been meant as: a key much like it, the same word in a section, one a bit like it."""
    *sections, last = path
    known = _known_keys(sections)
    alike = difflib.get_close_matches(last, known, n=1, cutoff=0.75)
    alike = alike or [f"{key}.{last}" for key in known if not sections and last in _known_keys([key])]
    alike = alike or difflib.get_close_matches(last, known, n=1, cutoff=0.5)
    meant = " or ".join(".".join([*sections, key]) for key in alike)
    return f"did you mean {meant}?" if meant else f"known keys: {', '.join(known)}"


def _known_keys(sections: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for section in sections:
        annotation = model.model_fields[section].annotation
        annotation = next((part for part in get_args(annotation) if part is not type(None)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_default(config: Config, key: str) -> bool:
    value, default = getattr(config, key), Config.model_fields[key].get_default(call_default_factory=True)
    return value is default or (type(value) is type(default) and bool(value == default))


def _curriculum(config: Config) -> list[str]:
    """Difficulty comes from one place, and only for a curriculum."""
    if config.curriculum is None:
        return ["difficulty_fn belongs to a curriculum; add curriculum: {epochs: …}"] if config.difficulty_fn else []
    given = (config.difficulty_fn, config.curriculum.column, config.curriculum.by)
    if sum(source is not None for source in given) != 1:
        return ["curriculum needs the difficulty of the samples; give difficulty_fn, curriculum.column or by: loss"]
    if config.curriculum.by == "loss" and config.num_epochs == 1:
        return ["curriculum.by=loss ranks the samples after the first epoch, but num_epochs=1; use 2 or more"]
    return []


def _inexact(config: Config) -> list[str]:
    """Keys whose numbers depend on the number of ranks, and what they cannot be used with."""
    problems = []
    if config.compression != "none" and config.exact and config.train_fn is None:
        problems.append(f"compression={config.compression} rounds the sums by the number of ranks; set exact: false")
    if config.compression == "powersgd" and config.find_unused_parameters:
        problems.append("compression=powersgd cannot be used with find_unused_parameters=true; use bf16 or fp16")
    if config.sync_batchnorm and config.exact and config.train_fn is None:
        problems.append("sync_batchnorm=true takes its statistics over all ranks; set exact: false")
    if config.sync_batchnorm and config.device == "cpu":
        problems.append("sync_batchnorm=true cannot work with device=cpu, torch has it for GPUs; remove one of them")
    return problems


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
