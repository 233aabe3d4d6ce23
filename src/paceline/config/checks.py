"""Mistakes that show only when several keys are compared, as a table of small checks.

A check is a function of the config that yields one sentence for each problem.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator

from paceline.config.functions import is_model_loss, name_of
from paceline.config.keys import EVALUATION_KEYS, MANAGED_KEYS, OWN_LOOP_KEYS
from paceline.config.schema import Config
from paceline.config.sections import SCHEDULES, Schedule
from paceline.config.written import written
from paceline.user_code import with_place

Check = Callable[[Config], Iterable[str]]

ADD_RUN = "write def train(model, train_loader, val_loader, device, num_epochs, run)"
LOSSES = ("val_loss", "train_loss")  # metrics of which lower values are better


def conflicts(config: Config, invalid: Collection[str] = ()) -> list[str]:
    """All problems that CHECKS finds. The keys in `invalid` have their default, because their value was refused."""
    runnable = [check for check, keys in CHECKS.items() if not set(keys) & set(invalid)]
    return [problem for check in runnable for problem in check(config)]


def _is_set(config: Config, key: str) -> bool:
    """Whether a key differs from its default: the config in a run folder lists every key, set by the user or not."""
    value, default = getattr(config, key), Config.model_fields[key].get_default(call_default_factory=True)
    return value is not default and (type(value) is not type(default) or value != default)


def _words(config: Config, key: str, value: object) -> str:
    """A setting as the user would type it."""
    return written({key: value}, config.origin.place)


# --- what must be given, and what excludes each other -------------------------------------------------------------


def _required(key: str, example: str) -> Check:
    def check(config: Config) -> Iterator[str]:
        if getattr(config, key) is None:
            yield f"{key} is missing; give {example}"

    return check


def _loop_is_given(config: Config) -> Iterator[str]:
    if config.train_fn is None and config.loss_fn is None and config.step_fn is None:
        yield (
            "train_fn, loss_fn and step_fn are all missing; give train_fn (your own loop), or loss_fn or step_fn (the "
            "managed loop)"
        )


def _exclusive(first: str, second: str) -> Check:
    def check(config: Config) -> Iterator[str]:
        if _is_set(config, first) and _is_set(config, second):
            yield f"{first} and {second} are both given; keep one of them"

    return check


def _phases_have_optimizers(config: Config) -> Iterator[str]:
    if not isinstance(config.step_fn, dict):
        return
    phases = ", ".join(map(str, config.step_fn))
    if not config.step_fn or "" in config.step_fn:
        yield "step_fn is a dict without names of phases; give a function, or {name: function, …}"
    elif config.optimizer_fn is None:
        yield f"step_fn has the phases {phases}; give optimizer_fn(model), which returns a dict with their optimizers"
    if config.shard_optimizer:
        yield f"shard_optimizer=true needs one optimizer, but step_fn has the phases {phases}; remove shard_optimizer"
    if config.compression == "powersgd":
        yield f"compression=powersgd needs one optimizer, but step_fn has the phases {phases}; use bf16 or fp16"


# --- train_fn -----------------------------------------------------------------------------------------------------


def _train_fn_runs_when_called(config: Config) -> Iterator[str]:
    is_generator = inspect.isgeneratorfunction(config.train_fn)
    if callable(config.train_fn) and (is_generator or inspect.iscoroutinefunction(config.train_fn)):
        kind = "is a generator" if is_generator else "is async"
        yield f"train_fn={name_of(config.train_fn)} {kind}, so calling it trains nothing; use a plain function"


def train_fn_problems(config: Config) -> Iterator[str]:
    """Keys that the user's own loop does not have; called once `train_fn` is imported."""
    if not callable(config.train_fn):
        return
    known = (*OWN_LOOP_KEYS, *EVALUATION_KEYS) if config.takes_run else ()
    unused = [key for key in ("loss_fn", "step_fn", *MANAGED_KEYS) if key not in known and _is_set(config, key)]
    without_run = [key for key in unused if key in OWN_LOOP_KEYS]
    if without_run:
        need = "needs" if len(without_run) == 1 else "need"
        yield f"{', '.join(without_run)} {need} a train_fn with the parameter run, or the managed loop; {ADD_RUN}"
    if managed := [key for key in unused if key not in OWN_LOOP_KEYS]:
        belong = "belongs" if len(managed) == 1 else "belong"
        place = with_place("train_fn", config.train_fn)
        yield f"{', '.join(managed)} {belong} to the managed loop; do it in {place}, or remove train_fn"
    if config.takes_run:
        if config.curriculum is not None and config.curriculum.by == "loss":
            yield "curriculum.by=loss needs the managed loop; give difficulty_fn or curriculum.column instead"
        if config.sync_batchnorm:
            yield "sync_batchnorm=true needs the managed loop, or a train_fn without `run`; remove it"
        return
    if config.resume not in ("auto", "never"):
        yield (
            f"resume={config.resume} names a run to continue, but a train_fn without `run` keeps no checkpoints; "
            f"{ADD_RUN}, or use --resume auto to start from the beginning"
        )
    if config.log.trackers:
        yield f"log.trackers has nothing to record in a train_fn without `run`; {ADD_RUN}"


# --- schedules ----------------------------------------------------------------------------------------------------


def _schedule_has_its_options(config: Config) -> Iterator[str]:
    """Options that belong to another schedule, and options that a schedule cannot do without."""
    name, options, schedule = config.schedule.name, SCHEDULES[config.schedule.name], config.schedule
    for key in (key for key in Schedule.model_fields if key != "name" and key not in options):
        value = getattr(schedule, key)
        if value is not None and value != Schedule.model_fields[key].default:
            owners = ", ".join(each for each, known in SCHEDULES.items() if key in known)
            takes = f"schedule.name={name} takes {', '.join(options)}"
            if "schedule" in config.origin.overridden:
                takes += f"; or replace the section: 'schedule={{name: {name}}}'"
            yield f"schedule.{key}={value} belongs to {owners}; {takes}"
    if name == "exponential" and schedule.final == 0:
        yield "schedule.name=exponential needs final, the last factor of the learning rate; give final, such as 0.01"
    if name == "step" and (schedule.every_epochs is None) == (schedule.every_steps is None):
        yield "schedule.name=step needs one of every_epochs and every_steps; give one, such as 30 epochs"


def _plateau_metric_is_measured(config: Config) -> Iterator[str]:
    if config.schedule.name == "plateau":
        yield from _unmeasured(config, "schedule", config.schedule.option("metric"), config.schedule.mode)


def _early_stop_metric_is_measured(config: Config) -> Iterator[str]:
    if config.early_stop is not None:
        yield from _unmeasured(config, "early_stop", config.early_stop.metric, config.early_stop.mode)


def _unmeasured(config: Config, key: str, metric: str, mode: str | None) -> Iterator[str]:
    """The problem with a metric to watch: it is not measured, or whether higher or lower is better is not known."""
    measured = [*LOSSES, *config.metrics]
    if metric not in measured and not _names_its_numbers(config):
        yield f"{key}.metric={metric!r} is not measured; use {', '.join(measured)}"
    elif mode is None and metric not in LOSSES:
        yield f"{key}.metric={metric!r} needs {key}.mode, whether higher or lower is better; give mode: max or min"


# --- data and metrics ---------------------------------------------------------------------------------------------


def _curriculum_has_difficulty(config: Config) -> Iterator[str]:
    if config.curriculum is None:
        if config.difficulty_fn:
            yield "difficulty_fn belongs to a curriculum; add curriculum: {epochs: …}"
        return
    sources = (config.difficulty_fn, config.curriculum.column, config.curriculum.by)
    if sum(source is not None for source in sources) != 1:
        yield "curriculum needs the difficulty of the samples; give difficulty_fn, curriculum.column or by: loss"
    elif config.curriculum.by == "loss" and config.num_epochs == 1:
        yield "curriculum.by=loss ranks the samples after the first epoch, but num_epochs=1; use 2 or more"
    if config.curriculum.by == "loss" and (config.step_fn is not None or is_model_loss("loss_fn", config.loss_fn)):
        yield "curriculum.by=loss needs a loss_fn(output, target); give that, difficulty_fn or curriculum.column"


def _order_knows_the_samples(config: Config) -> Iterator[str]:
    is_split = config.val_fraction > 0 and config.val_df is None and config.val_dataset_fn is None
    if config.order_fn is not None and is_split:
        yield (
            f"val_fraction={config.val_fraction} would take samples out of the data set that order_fn orders; "
            f"set {_words(config, 'val_fraction', 0)}, or give val_df or val_dataset_fn"
        )


def _lanes_fill_the_global_batch(config: Config) -> Iterator[str]:
    whole, size, lanes = config.global_batch_size, config.batch_size, config.lanes
    if whole is None:
        return
    if whole % size:
        near = [whole // size * size or size, (whole // size + 1) * size]
        advice = " or ".join(map(str, sorted(set(near))))
        yield f"global_batch_size={whole} is not a multiple of batch_size={size}; use {advice}, or another batch_size"
    elif lanes not in (None, whole // size):
        yield (
            f"global_batch_size={whole} and batch_size={size} give lanes={whole // size}, but lanes={lanes} is given; "
            "leave one of the three out"
        )


def _names_its_numbers(config: Config) -> bool:
    """Whether the names of metrics are known only when a function of the user has run."""
    return any(function is not None for function in (config.step_fn, config.evaluate_fn, config.train_fn))


def _best_metric_is_measured(config: Config) -> Iterator[str]:
    best, measured = config.checkpoint.best, [*LOSSES, *config.metrics]
    if _names_its_numbers(config):
        return
    if best is not None and best.metric not in measured:
        yield f"checkpoint.best.metric={best.metric!r} is not measured; use {', '.join(measured)}"


# --- processes and devices ----------------------------------------------------------------------------------------


def _nodes_have_rendezvous(config: Config) -> Iterator[str]:
    if (config.nodes is None) != (config.rendezvous is None):
        yield "nodes and rendezvous belong together, as in --nodes 2 --rendezvous HOST:29400; give both"


def _launcher_takes_nodes(config: Config) -> Iterator[str]:
    if config.launcher == "ray" and config.nodes is not None:
        yield f"nodes={config.nodes} is chosen by Ray with launcher=ray; remove it, procs counts all processes"


def _several_processes_use_ddp(config: Config) -> Iterator[str]:
    if config.ddp:
        return
    if config.nodes is not None:
        yield f"nodes={config.nodes} needs DDP; remove {_words(config, 'ddp', False)}"
    if (config.procs_range or (1, 1))[0] > 1:
        words = f"remove {_words(config, 'ddp', False)}, or use {_words(config, 'procs', 1)}"
        yield f"procs={config.procs} needs DDP; {words}"


def _exact_excludes_rank_dependent_sums(config: Config) -> Iterator[str]:
    is_exact, inexact = config.exact and config.keeps_state, _words(config, "exact", False)
    if config.compression != "none" and is_exact:
        yield f"compression={config.compression} makes results depend on the number of ranks; set {inexact}"
    if config.compression == "powersgd" and config.find_unused_parameters:
        yield "compression=powersgd cannot be used with find_unused_parameters=true; use bf16 or fp16"
    if config.sync_batchnorm and is_exact:
        yield f"sync_batchnorm=true makes results depend on the number of ranks; set {inexact}"


def _cpu_suffices(config: Config) -> Iterator[str]:
    if config.device != "cpu":
        return
    if config.sync_batchnorm:
        yield "sync_batchnorm=true needs a GPU, but device=cpu; remove one of them"
    if config.step_mode == "graph":
        yield "step_mode=graph needs a GPU, but device=cpu; use step_mode: auto"
    if config.backend == "nccl":
        yield "backend=nccl needs a GPU, but device=cpu; use backend: gloo"


# In the order of the messages. Each check is skipped if one of the keys beside it was refused: it would take the
# default in its place for a mistake of the user.
CHECKS: dict[Check, tuple[str, ...]] = {
    _required("model_fn", "a function that returns the model"): ("model_fn",),
    _required("dataset_fn", "a function or class that returns the data set"): ("dataset_fn",),
    _loop_is_given: ("train_fn", "loss_fn", "step_fn"),
    _exclusive("loss_fn", "step_fn"): (),
    _phases_have_optimizers: ("step_fn", "optimizer_fn"),
    _train_fn_runs_when_called: (),
    _exclusive("optimizer", "optimizer_fn"): (),
    _exclusive("schedule", "schedule_fn"): (),
    _exclusive("schedule", "scheduler_fn"): (),
    _exclusive("schedule_fn", "scheduler_fn"): (),
    _schedule_has_its_options: (),
    _plateau_metric_is_measured: ("metrics",),
    _early_stop_metric_is_measured: ("metrics",),
    _curriculum_has_difficulty: (),
    _exclusive("sample_weights", "order_fn"): (),
    _exclusive("sample_weights", "curriculum"): (),
    _exclusive("order_fn", "curriculum"): (),
    _order_knows_the_samples: ("order_fn", "val_fraction", "val_df", "val_dataset_fn"),
    _exclusive("val_df", "val_fraction"): (),
    _exclusive("val_dataset_fn", "val_fraction"): (),
    _lanes_fill_the_global_batch: ("global_batch_size", "batch_size", "lanes"),
    _best_metric_is_measured: ("metrics",),
    _nodes_have_rendezvous: ("nodes", "rendezvous"),
    _launcher_takes_nodes: (),
    _several_processes_use_ddp: (),
    _exact_excludes_rank_dependent_sums: (),
    _cpu_suffices: (),
}
