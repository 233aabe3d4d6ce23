"""The keys of a config for the execution of a run: its size and speed, its safety, its processes; in groups.

Descriptions are used in the same way as those in `training_keys.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from paceline.config.sections import Checkpoint, Log, Section
from paceline.config.values import Otherwise, address, false_as, number_or_range, path_as_text, run_or_mirror, seconds

NumberOrRange = (
    Annotated[int, Field(ge=1)] | Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^\s*\d+(:\d+)?\s*$"})]
)


class SizeAndSpeed(Section):
    """Size and speed."""

    batch_size: int = Field(32, ge=1)
    """The number of samples in a micro-batch, which one device processes at once."""

    lanes: Annotated[int | None, Otherwise("the number of processes")] = Field(None, ge=1)
    """The number of micro-batches in a step, which the processes share; at most as many processes can be used.

    The weights are the same for any number of processes. A process that has several lanes keeps the gradients of each
    until the end of the step.
    """

    global_batch_size: int | None = Field(None, ge=1)
    """The number of samples in a step: `lanes` = `global_batch_size` ÷ `batch_size`, which must divide it.

    The run can then use any number of processes up to `lanes`, with the same result.
    """

    num_epochs: int = Field(1, ge=1)
    """The number of passes over the data."""

    max_steps: int | None = Field(None, ge=1)
    """Ends the run after this number of steps, if it has not ended after `num_epochs`.

    Schedules that end with the run need it if the data set is iterable.
    """

    workers: int = Field(0, ge=0)
    """The number of DataLoader processes per rank."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The floating-point format of the forward pass.

    `bf16` and `fp16` run it in torch's autocast (in your own loop, that is `run.autocast()`); `fp16` scales the loss.
    `auto` is `bf16` on GPUs that support it, else `fp32`.
    """

    tf32: bool = True
    """Matrix products and convolutions of `fp32` use the tensor cores of NVIDIA GPUs, with 10 bits of mantissa.

    No effect on a CPU.
    """

    channels_last: bool | Literal["auto"] = "auto"
    """Stores filters and images in channels-last format, which tensor cores prefer.

    `auto` uses it on GPUs, in the managed loop, if the model has a `Conv2d`. Checkpoints do not depend on it; the
    kernels, and so the last bits of the weights, may.
    """

    step_mode: Literal["auto", "eager", "compile", "graph"] = "auto"
    """How a step is executed: kernel by kernel, as a CUDA graph, or compiled.

    `eager`: kernel by kernel. `graph`: steps of full lanes are recorded once as CUDA graphs and replayed, with
    identical results, including NCCL's sums over ranks; a single rank records each combination of shapes that occurs
    often. A step that cannot be recorded runs eagerly, and one line gives the reason. `compile`: `torch.compile` makes
    kernels for the model and its loss together, for full batches of one shape; on a GPU the step is also recorded.
    `auto`: `graph` on a GPU, and also `compile` where the run is long enough to earn the time back
    ([compiled steps](exactness.md#compiled-steps)).
    """

    data_on_device: float = Field(0.5, ge=0, le=1)
    """The fraction of a GPU's free memory that a data set of tensors may use; 0 uses the DataLoader.

    That is a `TensorDataset`, or a data set with a method `as_tensors()` that returns a tuple or dict of tensors with
    one row per sample. Batches are then gathered on the device, without a DataLoader; also on a CPU, where nothing is
    copied.
    """

    exact: bool = True
    """Computes sums in a fixed order and with deterministic kernels, in the managed loop and with `run`
    ([exactness](exactness.md))."""

    check_replicas_every: int = Field(100, ge=1)
    """The number of steps between checks that all ranks have the same weights."""

    ddp: bool = True
    """False trains without DDP, in one process."""

    find_unused_parameters: bool = False
    """Allows parameters that are not used in a step."""

    static_graph: bool = False
    """Promises DDP that every step runs the same graph."""

    bucket_mb: float = Field(25, gt=0)
    """The size of the buckets in which DDP sends gradients."""

    compression: Annotated[Literal["none", "bf16", "fp16", "powersgd"], false_as("none")] = "none"
    """The format in which the ranks of the managed loop send gradients. Needs `exact: false`.

    They are sent as `bf16` or `fp16`, or after 100 steps as low-rank matrices (`powersgd`; each rank keeps its own
    error memory, which is not saved in checkpoints).
    """

    sync_batchnorm: bool = False
    """Computes BatchNorm's statistics over all ranks, on GPUs. Needs `exact: false` and one lane per rank."""

    shard_optimizer: bool = False
    """Each rank of the managed loop keeps the optimizer state of only a part of the parameters (ZeRO-1).

    The weights and the checkpoints are identical; a run can be resumed with or without it. A step sends as many bytes
    as without it (unless gradients are compressed): each gradient is summed on one rank, which sends the updated
    parameter to the others. For optimizers that update each parameter from its own gradient, such as all of
    `torch.optim` except LBFGS. With `muon`, matrices of one shape stay on one rank.
    """


class NeverLoseARun(Section):
    """Never lose a run."""

    checkpoint: Checkpoint = Checkpoint()
    """When the managed loop, or a `train_fn` with `run`, saves, and how many checkpoints are kept.

    It also saves at the end and when it is stopped ([reliability](reliability.md)).
    """

    resume: Annotated[str, BeforeValidator(path_as_text), BeforeValidator(run_or_mirror)] = "never"
    """`auto` resumes the run in `run_dir`, or the newest unfinished run of that name.

    A path is the run folder to resume, or a checkpoint to start a new run from. A URL is that of a mirrored run, which
    is downloaded into a new run folder ([mirror](mirror.md)).
    """

    time_limit: Annotated[float | None, BeforeValidator(seconds, json_schema_input_type=float | str | None)] = Field(
        None, gt=0
    )
    """Saves and stops after this time: seconds, `1h30m` or `1:30:00`."""

    nan: Annotated[Literal["skip", "stop", "off"], false_as("off")] = "skip"
    """`skip` discards a step whose loss or gradients are not finite; `stop` stops the run; `off` does not check."""

    nan_limit: int = Field(20, ge=1)
    """Stops the run after this number of consecutive skipped steps."""

    max_restarts: Annotated[int | None, Otherwise("3, or 0 with a `train_fn` without `run`")] = Field(None, ge=0)
    """The maximum number of restarts after a rank was killed or all ranks have hung.

    The count is reset when the run has made progress.
    """

    hang_timeout_s: float = Field(600, ge=0)
    """If no rank makes progress for this number of seconds, the hang is reported and the ranks restart.

    See `max_restarts`. 0 waits forever.
    """


class WhereItRuns(Section):
    """Where it runs."""

    launcher: str = "auto"
    """The program that starts the processes: `local`, `torchrun`, `slurm` or `ray`.

    `local`: Paceline starts them; `torchrun` joins processes that torchrun has started; `slurm` joins the tasks of an
    `srun` step; with `ray`, Ray Train starts them ([clusters](clusters.md)). `auto` detects the first three. Other
    packages can [add launchers](clusters.md#a-launcher-of-your-own).
    """

    procs: Annotated[
        int | str | None,
        BeforeValidator(number_or_range("processes"), json_schema_input_type=NumberOrRange | None),
        Otherwise("one per GPU, or 1"),
    ] = None
    """The number of processes that a local run starts, or a range such as `1:4`.

    A range means the largest number in it that the GPUs, or cores, and `lanes` allow. With `ray`, the number on all
    nodes together. torchrun determines the number itself.
    """

    nodes: Annotated[
        int | str | None, BeforeValidator(number_or_range("hosts"), json_schema_input_type=NumberOrRange | None)
    ] = None
    """The number of hosts, each of which runs the same command ([clusters](clusters.md)).

    Or a range such as `1:4`: the run starts with the smaller number and grows. `procs` is the number of processes on
    each host.
    """

    rendezvous: Annotated[str | None, BeforeValidator(address)] = None
    """`HOST:PORT`: the address of one of the hosts, and a free port on it."""

    threads: Annotated[int | None, Otherwise("cores ÷ lanes; without `lanes`, cores ÷ processes")] = Field(None, ge=1)
    """The number of CPU threads per process."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` or `cpu`; `auto` is CUDA if there is a GPU."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """`nccl` or `gloo`; `auto` is NCCL if every process has its own GPU."""

    log: Log = Log()
    """How often and where values are logged ([logged values](#logged-values-and-tensorboard))."""
