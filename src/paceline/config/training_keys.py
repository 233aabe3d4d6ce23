"""The keys of a config for the training: the run, its data, its loop; in groups.

The text below a key is its description in the documentation, in the JSON schema and in editors; its first sentence is
in the docstring of `Trainer`. A group's docstring is its heading. After a change run `make reference`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from paceline.config.phases import with_every
from paceline.config.sections import (
    Augmentation,
    EarlyStop,
    Evaluate,
    Optimizer,
    Pacing,
    Schedule,
    ScheduleName,
    Section,
)
from paceline.config.values import (
    REQUIRED,
    Function,
    FunctionName,
    Otherwise,
    listed,
    local,
    named,
    named_metrics,
    packed,
)

Table = Annotated[Any, WithJsonSchema({"type": "string"})]  # a DataFrame, or the path of a file
Folder = Annotated[Path | None, BeforeValidator(local)]


class TimedPhase(Section):
    """A phase of a step that runs at every n-th step, in a config file; in Python, `paceline.every` creates it."""

    every: int = Field(ge=1)
    """The phase runs at every n-th step."""

    fn: FunctionName
    """The function of the phase."""


class TheRun(Section):
    """The run."""

    name: str = Field("run", pattern=r"^[\w.-]+$")
    """The name of the run. The default run folder is `runs/<name>/<date-time>`."""

    seed: int = 0
    """Determines the order of samples, the split, the initial weights, dropout and augmentation."""

    run_dir: Folder = None
    """The run folder itself: a local path. URLs such as `s3://…` are rejected."""

    folder: Annotated[Folder, Otherwise("the config's, or that of your functions' modules")] = None
    """Where functions by name and relative paths of data are looked up.

    The config in the run folder keeps it, so that `paceline evaluate` finds them again.
    """


class WhatToTrain(Section):
    """What to train."""

    model_fn: Annotated[Function | None, Otherwise(REQUIRED)] = None
    """`model_fn(**model_args)` returns the model.

    The managed loop puts the whole model into training mode, because pretrained models are loaded in evaluation mode.
    To keep a layer in evaluation mode, override its `train` method.
    """

    model_args: dict[str, Any] = Field(default_factory=dict)
    """The arguments of `model_fn`."""

    dataset_fn: Annotated[Function | None, Otherwise(REQUIRED)] = None
    """`dataset_fn(df, **dataset_args)`, or without `df` if there is none, returns the data set.

    That is a map-style data set, or an iterable one that selects its share with `paceline.shard`. If the data set has a
    `collate_fn`, it is used. If its `__getitems__` returns a tuple or a dict, that is a finished batch. A batch counts
    as the number of samples that were requested, so filter samples in the data set, not in `collate_fn`.
    """

    dataset_args: dict[str, Any] = Field(default_factory=dict)
    """The arguments of `dataset_fn` after `df`."""

    df: Table = None
    """A DataFrame, or the path of a `.csv`, `.csv.gz` or `.parquet` file (`paceline[parquet]`).

    The path is relative to the config; on the command line also relative to the working directory.
    """

    val_df: Table = None
    """Validation data instead of a split: `dataset_fn(val_df, **dataset_args)`."""

    val_dataset_fn: Function | None = None
    """Validation data instead of a split: `val_dataset_fn(val_df)`, or without `val_df` if there is none."""

    val_fraction: float = Field(0.1, ge=0, lt=1)
    """The fraction of samples used for validation, selected by the seed. An iterable data set is not split."""

    collate_fn: Annotated[Function | None, Otherwise("the data set's own, or torch's")] = None
    """`collate_fn(samples)` builds a batch from a list of samples, for training and evaluation.

    A function, or an object such as the data collators of transformers ([more](#which-samples-in-which-order)).
    """

    sample_weights: Annotated[Any, BeforeValidator(packed, json_schema_input_type=str | list[float] | None)] = None
    """Draws the training samples with replacement, with a weight for each sample.

    The weights are a column of `df`, an array, tensor or list, or `sample_weights(dataset)`, which returns one
    ([more](#which-samples-in-which-order)).
    """

    order_fn: Function | None = None
    """`order_fn(epoch, size)` returns the order of the training samples in an epoch, as `size` indices
    ([more](#which-samples-in-which-order))."""


class YourOwnLoop(Section):
    """Your own loop."""

    train_fn: Function | None = None
    """`train_fn(model, train_loader, val_loader, device, num_epochs, run)`, or without `run`, trains the model.

    With [`run`](your_loop.md) it is saved and resumed, and gives the same weights on any number of processes. Each
    process gets its share of the batches; `val_loader.dataset` is its share of the validation data.
    """


class TheManagedLoop(Section):
    """The managed loop."""

    loss_fn: Annotated[Function, WithJsonSchema({"type": "string"})] | None = None
    """`loss_fn(output, target)` returns a mean over the batch.

    Or the name of a function of `torch.nn.functional`; or `model`, for a model that returns its own loss
    ([more](#the-loss)).
    """

    step_fn: Annotated[
        Function | dict[str, Function] | None,
        BeforeValidator(with_every, json_schema_input_type=FunctionName | dict[str, FunctionName | TimedPhase] | None),
    ] = None
    """`step_fn(model, batch)`, instead of `loss_fn`, calls the model in any way and returns a loss.

    It may also return a dict with `loss` and further numbers, which are logged. With several optimizers, give a dict of
    such functions. See [Any step](steps.md).
    """

    evaluate_fn: Function | None = None
    """`evaluate_fn(model, batch)` returns a dict of numbers for a batch of the validation data.

    The numbers are means, or `paceline.Sum(total, count)`. They keep their names, but `loss` becomes `val_loss`.
    Without it, validation calls `loss_fn`, or `step_fn`, whose numbers become `val_loss`, `val_NAME`. It may be set
    with `train_fn`, for `paceline evaluate`.
    """

    predict_fn: Annotated[Function | None, Otherwise("the output of the model, or its `logits`")] = None
    """`predict_fn(model, batch)` returns a tensor with a row for each sample, for `paceline predict`."""

    metrics: Annotated[
        list[str] | dict[str, Any],
        BeforeValidator(named_metrics, json_schema_input_type=str | list[str] | dict[str, FunctionName]),
    ] = Field(default_factory=list)
    """Names (`accuracy`, `mse`, `mae`), or one name, or `{name: function(output, target)}`.

    A function returns the same as `loss_fn` ([more](#metrics)). All metrics are tried on one batch before the
    first step.
    """

    optimizer: Annotated[Optimizer, BeforeValidator(named, json_schema_input_type=str | Optimizer)] = Optimizer()
    """An optimizer of `torch.optim` with its arguments, or only its name; or `muon` ([more](#the-optimizer)).

    It is `fused` if it supports that, unless you set `fused` or `foreach`.
    """

    optimizer_fn: Function | None = None
    """`optimizer_fn(model)` returns an optimizer, instead of `optimizer`.

    It returns a dict of optimizers if `step_fn` has [phases](steps.md#several-optimizers). A scheduler of torch belongs
    in `scheduler_fn` and is rejected here ([more](#the-optimizer)).
    """

    schedule: Annotated[Schedule, BeforeValidator(named, json_schema_input_type=ScheduleName | Schedule)] = Schedule()
    """The learning rate over the run: the name of a schedule, or a name with [options](#the-learning-rate)."""

    schedule_fn: Function | None = None
    """`schedule_fn(step, total_steps)` returns the factor of the learning rates in that step, instead of `schedule`.

    `step` counts from 0.
    """

    scheduler_fn: Function | None = None
    """`scheduler_fn(optimizer)` returns a scheduler of `torch.optim.lr_scheduler`, instead of `schedule`.

    Or `scheduler_fn(optimizer, total_steps)`. The scheduler is stepped after each update, or after each evaluation if
    it needs a metric (`ReduceLROnPlateau`), and saved in checkpoints. The metric is `val_loss`, or `train_loss` if
    nothing measures `val_loss`; for another metric return `(scheduler, "accuracy")`, which `mode="max"` requires.
    """

    early_stop: EarlyStop | None = None
    """Ends the run as complete when a metric has stopped improving."""

    evaluate: Evaluate = Evaluate()
    """When the validation data is evaluated. By default at the end of each epoch."""

    clip_norm: float | None = Field(None, gt=0)
    """Clips the norm of the gradient of the whole step to this value."""

    ema: float | None = Field(None, gt=0, lt=1)
    """Keeps an exponential moving average of the weights with this decay (such as 0.999), in at least 32 bits.

    The average is used for evaluation, and `load` returns it.
    """

    augment: Augmentation | None = None
    """Operations on images on the device, identical on any number of processes.

    Images are the first input with four dimensions (N, C, H, W).
    """

    curriculum: Pacing | None = None
    """Trains on easy samples first.

    The difficulty is `difficulty_fn`, `column` or `by: loss`. All epochs have the same number of samples: while a part
    of the data is used, its samples are repeated equally often.
    """

    difficulty_fn: Function | None = None
    """`difficulty_fn(sample)` returns a number, larger for harder samples, for a `curriculum`.

    Each process calls it once for each training sample, before the first step.
    """

    callbacks: Annotated[
        list[Any], BeforeValidator(listed, json_schema_input_type=FunctionName | list[FunctionName])
    ] = Field(default_factory=list)
    """Objects of classes that derive from `paceline.Callback`, or `"module:Class"` in a config ([more](#callbacks)).

    Their methods are called on every rank at the same step: `on_start(run)`, `on_step(run, metrics)`,
    `on_evaluate(run, metrics)`, `on_checkpoint(run, path)`, `on_stop(run, reason)`. Their `state_dict()` is saved in
    checkpoints. `run` describes the run, and provides `run.save()`, `run.stop(reason)` (resume it later) and
    `run.finish(reason)` (it is complete).
    """
