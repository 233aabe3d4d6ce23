"""`Trainer`, which takes every config key as a keyword. Training itself is in `launch` and `worker`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import Config, build
from paceline.config.functions import check_not_importing
from paceline.errors import Stopped, StoppedScript, UnknownAttribute
from paceline.system.signals import requests_deferred
from paceline.user_code import is_notebook

if TYPE_CHECKING:
    from typing_extensions import Never

    from paceline.callbacks import Callback
    from paceline.config.sections import ScheduleName
    from paceline.keywords import (
        AugmentOptions,
        CheckpointOptions,
        CollateFn,
        CurriculumOptions,
        DatasetFn,
        DifficultyFn,
        EarlyStopOptions,
        EvaluateFn,
        EvaluateOptions,
        LogOptions,
        LossFn,
        Metrics,
        ModelFn,
        OptimizerFn,
        OrderFn,
        PredictFn,
        SampleWeights,
        ScheduleFn,
        ScheduleOptions,
        SchedulerFn,
        StepFns,
        TableOrPath,
        TrainFn,
    )
    from paceline.results.result import Result


def build_config(raw: Mapping[str, Any], folder: Path | None = None, overridden: Sequence[str] = ()) -> Config:
    """A valid config whose launcher, trackers, optimizer, metrics and loss exist; otherwise one ConfigError for all.

    `overridden` are the keys of the command line, for the words in messages.
    """
    return build(_with_rendezvous(raw, folder), folder=folder, overridden=overridden, checks=CHECKS)


def _with_rendezvous(raw: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """The keys with the rendezvous of MASTER_ADDR and MASTER_PORT, if there are several hosts and it is not given."""
    if raw.get("nodes") is None or raw.get("rendezvous") is not None:
        return raw
    from paceline.launch.environment import load_dotenv, rendezvous_in_environment

    load_dotenv(folder or Path())
    if (rendezvous := rendezvous_in_environment()) is None:
        return raw
    print(f"rendezvous={rendezvous}, from MASTER_ADDR and MASTER_PORT", file=sys.stderr, flush=True)
    return {**raw, "rendezvous": rendezvous}


def _unknown_launcher(config: Config) -> Iterator[str]:
    from paceline.launch import unknown_launcher

    yield from unknown_launcher(config)


def _unknown_trackers(config: Config) -> list[str]:
    from paceline.observe.sinks.registry import problems_with

    return problems_with(config.log.trackers)


def _reserved_metrics(config: Config) -> Iterator[str]:
    from paceline.observe.event_types import is_reserved

    for name in sorted(name for name in config.metrics if name == "val_loss" or is_reserved(name)):
        yield f"metrics.{name} has a name that is reserved in events and results; choose another name"


def _data_problems(config: Config) -> Iterator[str]:
    from paceline.data.weights import weight_problems  # imports torch, as the engine does

    yield from weight_problems(config)


def _engine_problems(config: Config) -> Iterator[str]:
    """The problems that only torch and the engine can find."""
    # Imports torch, so it must come after the user's modules, which may set environment variables for torch.
    from paceline.engine.config_checks import unknown_names, unsuitable_loss

    yield from unknown_names(config)
    yield from unsuitable_loss(config)


CHECKS = (_unknown_launcher, _unknown_trackers, _reserved_metrics, _data_problems, _engine_problems)


# Attributes of the result that a script may look for in the trainer.
RESULT_NAMES = (
    "metrics", "history", "weights_sha256", "run_dir", "value", "model", "load_model", "evaluate", "predict", "plot",
    "report",
)  # fmt: skip


class Trainer:
    """One run, ready to start."""

    def __init__(
        self,
        model_fn: ModelFn | None = None,
        dataset_fn: DatasetFn | None = None,
        df: TableOrPath | None = None,
        train_fn: TrainFn | None = None,
        batch_size: int = 32,
        num_epochs: int = 1,
        *,
        name: str = "run",
        seed: int = 0,
        run_dir: str | Path | None = None,
        folder: str | Path | None = None,
        model_args: Mapping[str, Any] | None = None,
        dataset_args: Mapping[str, Any] | None = None,
        val_df: TableOrPath | None = None,
        val_dataset_fn: DatasetFn | None = None,
        val_fraction: float = 0.1,
        collate_fn: CollateFn | None = None,
        sample_weights: SampleWeights | None = None,
        order_fn: OrderFn | None = None,
        loss_fn: LossFn | None = None,
        step_fn: StepFns | None = None,
        evaluate_fn: EvaluateFn | None = None,
        predict_fn: PredictFn | None = None,
        metrics: Metrics = (),
        optimizer: str | Mapping[str, Any] = "adamw",
        optimizer_fn: OptimizerFn | None = None,
        schedule: ScheduleName | ScheduleOptions = "constant",
        schedule_fn: ScheduleFn | None = None,
        scheduler_fn: SchedulerFn | None = None,
        early_stop: EarlyStopOptions | None = None,
        evaluate: EvaluateOptions | None = None,
        clip_norm: float | None = None,
        ema: float | None = None,
        augment: AugmentOptions | None = None,
        curriculum: CurriculumOptions | None = None,
        difficulty_fn: DifficultyFn | None = None,
        callbacks: Sequence[Callback | type[Callback] | str] = (),
        lanes: int | None = None,
        global_batch_size: int | None = None,
        max_steps: int | None = None,
        workers: int = 0,
        precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        tf32: bool = True,
        channels_last: bool | Literal["auto"] = "auto",
        step_mode: Literal["auto", "eager", "compile", "graph"] = "auto",
        data_on_device: float = 0.5,
        exact: bool = True,
        check_replicas_every: int = 100,
        ddp: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_mb: float = 25,
        compression: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        sync_batchnorm: bool = False,
        shard_optimizer: bool = False,
        checkpoint: CheckpointOptions | None = None,
        resume: str | Path = "never",
        time_limit: float | str | None = None,
        nan: Literal["skip", "stop", "off"] = "skip",
        nan_limit: int = 20,
        max_restarts: int | None = None,
        hang_timeout_s: float = 600,
        launcher: str = "auto",
        procs: int | str | None = None,
        nodes: int | str | None = None,
        rendezvous: str | None = None,
        threads: int | None = None,
        device: Literal["auto", "cuda", "cpu"] = "auto",
        backend: Literal["auto", "nccl", "gloo"] = "auto",
        log: LogOptions | None = None,
        **other_names: Never,
    ) -> None:
        """Check the settings of a run; functions may be lambdas, closures or from a notebook.

        Each keyword is a key of the config; docs/configuration.md has the details.

        Args: The run
            name: The name of the run.
            seed: Determines the order of samples, the split, the initial weights, dropout and augmentation.
            run_dir: The run folder itself: a local path.
            folder: Where functions by name and relative paths of data are looked up.

        Args: What to train
            model_fn: `model_fn(**model_args)` returns the model.
            model_args: The arguments of `model_fn`.
            dataset_fn: `dataset_fn(df, **dataset_args)`, or without `df` if there is none, returns the data set.
            dataset_args: The arguments of `dataset_fn` after `df`.
            df: A DataFrame, or the path of a `.csv`, `.csv.gz` or `.parquet` file (`paceline[parquet]`).
            val_df: Validation data instead of a split: `dataset_fn(val_df, **dataset_args)`.
            val_dataset_fn: Validation data instead of a split: `val_dataset_fn(val_df)`, or without `val_df` if there
                is none.
            val_fraction: The fraction of samples used for validation, selected by the seed.
            collate_fn: `collate_fn(samples)` builds a batch from a list of samples, for training and evaluation.
            sample_weights: Draws the training samples with replacement, with a weight for each sample.
            order_fn: `order_fn(epoch, size)` returns the order of the training samples in an epoch, as `size` indices.

        Args: Your own loop
            train_fn: `train_fn(model, train_loader, val_loader, device, num_epochs, run)`, or without `run`, trains the
                model.

        Args: The managed loop
            loss_fn: `loss_fn(output, target)` returns a mean over the batch.
            step_fn: `step_fn(model, batch)`, instead of `loss_fn`, calls the model in any way and returns a loss.
            evaluate_fn: `evaluate_fn(model, batch)` returns a dict of numbers for a batch of the validation data.
            predict_fn: `predict_fn(model, batch)` returns a tensor with a row for each sample, for `paceline predict`.
            metrics: Names (`accuracy`, `mse`, `mae`), or one name, or `{name: function(output, target)}`.
            optimizer: An optimizer of `torch.optim` with its arguments, or only its name; or `muon`.
            optimizer_fn: `optimizer_fn(model)` returns an optimizer, instead of `optimizer`.
            schedule: The learning rate over the run: the name of a schedule, or a name with options.
            schedule_fn: `schedule_fn(step, total_steps)` returns the factor of the learning rates in that step, instead
                of `schedule`.
            scheduler_fn: `scheduler_fn(optimizer)` returns a scheduler of `torch.optim.lr_scheduler`, instead of
                `schedule`.
            early_stop: Ends the run as complete when a metric has stopped improving.
            evaluate: When the validation data is evaluated.
            clip_norm: Clips the norm of the gradient of the whole step to this value.
            ema: Keeps an exponential moving average of the weights with this decay (such as 0.999), in at least 32
                bits.
            augment: Operations on images on the device, identical on any number of processes.
            curriculum: Trains on easy samples first.
            difficulty_fn: `difficulty_fn(sample)` returns a number, larger for harder samples, for a `curriculum`.
            callbacks: Objects of classes that derive from `paceline.Callback`, or `"module:Class"` in a config.

        Args: Size and speed
            batch_size: The number of samples in a micro-batch, which one device processes at once.
            lanes: The number of micro-batches in a step, which the processes share; at most as many processes can be
                used.
            global_batch_size: The number of samples in a step: `lanes` = `global_batch_size` ÷ `batch_size`, which must
                divide it.
            num_epochs: The number of passes over the data.
            max_steps: Ends the run after this number of steps, if it has not ended after `num_epochs`.
            workers: The number of DataLoader processes per rank.
            precision: The floating-point format of the forward pass.
            tf32: Matrix products and convolutions of `fp32` use the tensor cores of NVIDIA GPUs, with 10 bits of
                mantissa.
            channels_last: Stores filters and images in channels-last format, which tensor cores prefer.
            step_mode: How a step is executed: kernel by kernel, as a CUDA graph, or compiled.
            data_on_device: The fraction of a GPU's free memory that a data set of tensors may use; 0 uses the
                DataLoader.
            exact: Computes sums in a fixed order and with deterministic kernels, in the managed loop and with `run`.
            check_replicas_every: The number of steps between checks that all ranks have the same weights.
            ddp: False trains without DDP, in one process.
            find_unused_parameters: Allows parameters that are not used in a step.
            static_graph: Promises DDP that every step runs the same graph.
            bucket_mb: The size of the buckets in which DDP sends gradients.
            compression: The format in which the ranks of the managed loop send gradients.
            sync_batchnorm: Computes BatchNorm's statistics over all ranks, on GPUs.
            shard_optimizer: Each rank of the managed loop keeps the optimizer state of only a part of the parameters
                (ZeRO-1).

        Args: Never lose a run
            checkpoint: When the managed loop, or a `train_fn` with `run`, saves, and how many checkpoints are kept.
            resume: `auto` resumes the run in `run_dir`, or the newest unfinished run of that name.
            time_limit: Saves and stops after this time: seconds, `1h30m` or `1:30:00`.
            nan: `skip` discards a step whose loss or gradients are not finite; `stop` stops the run; `off` does not
                check.
            nan_limit: Stops the run after this number of consecutive skipped steps.
            max_restarts: The maximum number of restarts after a rank was killed or all ranks have hung.
            hang_timeout_s: If no rank makes progress for this number of seconds, the hang is reported and the ranks
                restart.

        Args: Where it runs
            launcher: The program that starts the processes: `local`, `torchrun`, `slurm` or `ray`.
            procs: The number of processes that a local run starts, or a range such as `1:4`.
            nodes: The number of hosts, each of which runs the same command.
            rendezvous: `HOST:PORT`: the address of one of the hosts, and a free port on it.
            threads: The number of CPU threads per process.
            device: `cuda` or `cpu`; `auto` is CUDA if there is a GPU.
            backend: `nccl` or `gloo`; `auto` is NCCL if every process has its own GPU.
            log: How often and where values are logged.
        """  # generated by `make reference`
        given = {key: value for key, value in locals().items() if value is not DEFAULTS.get(key)}
        del given["self"], given["other_names"]
        self.config: Config = build_config({**given, **other_names})
        self._folder, self._is_in_script = Path(), True

    @classmethod
    def from_config(cls, config: Config, folder: Path) -> Trainer:
        """A trainer for a config from `build_config`, read from a file in `folder`."""
        trainer = cls.__new__(cls)
        trainer.config, trainer._folder, trainer._is_in_script = config, folder, False
        return trainer

    if not TYPE_CHECKING:  # for editors, these methods do not exist

        def __getattr__(self, name: str) -> Any:
            """Names of other libraries for `start`, and of the result that it returns."""
            if name in ("fit", "train", "run"):
                raise UnknownAttribute(
                    f"Trainer has no method {name}(); call start(), which trains and returns the result"
                )
            if name in RESULT_NAMES:
                raise UnknownAttribute(f"Trainer has no attribute {name}; call start(), which returns the result")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def start(self) -> Result:
        """Train on the ranks that the config asks for, and return the result; may be called again."""
        check_not_importing()
        try:
            with requests_deferred():
                from paceline import launch
                from paceline.observe.sinks import registry

                registry.check(self.config.log.trackers)
                launch.prepare(self.config.__dict__, self._folder)  # before torch is imported in this process
                from paceline.launch.setup import TRAIN
                from paceline.results.result import result_of
            outcome = launch.start(self.config, TRAIN, self._folder)
        except Stopped as stopped:
            if not self._is_in_script:  # a command prints it
                raise
            text = f'{stopped}, or with Trainer(…, resume="auto")' if "--resume" in str(stopped) else str(stopped)
            if is_notebook():
                raise Stopped(text) from None
            print(f"paceline: {text}", file=sys.stderr, flush=True)
            raise StoppedScript(text) from None
        return result_of(outcome, self.config, self._folder)


# Of the keywords. A value that is the same object as its default is treated as not given: messages would repeat it.
DEFAULTS = {name: each.default for name, each in inspect.signature(Trainer).parameters.items()}
