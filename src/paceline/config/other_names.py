"""The names that Lightning, transformers, Accelerate, torchrun and scripts use for the keys of a config.

The table answers unknown keys (`answers.py`) and is printed in docs/coming_from.md, which a test compares with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.config.sections import SCHEDULES

REMOVE = "remove it"
BY_DEFAULT = "remove it, this is the default"


class Row(NamedTuple):
    """One or more names of other libraries, separated by spaces, and their replacement in Paceline."""

    write: str = ""  # YAML; VALUE is the user's value, … a value to fill in. Empty: there is no equivalent key
    note: str = ""
    values: Mapping[str, str] = {}  # the advice for some values or kinds of values: "write YAML; note", or a note
    lightning: str = ""
    transformers: str = ""
    accelerate: str = ""
    times: str = ""  # the key of the factor for the user's value
    unless: str = ""  # a key; if it is set, the names have the other meaning that the note describes
    others: str = ""  # names of torchrun, and usual names in scripts

    @property
    def names(self) -> list[str]:
        """All names of the row."""
        return " ".join((self.lightning, self.transformers, self.accelerate, self.others)).split()


_FALSE = dict.fromkeys(("false", "no", "none", "0", ""), REMOVE)
_ADAMW_NAMES = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_bnb_8bit", "adamw_8bit",
    "paged_adamw", "paged_adamw_8bit", "paged_adamw_32bit")  # fmt: skip
_SCHEDULERS = {
    **{name: f"write schedule: {{name: {name}}}" for name in SCHEDULES},
    "cosineannealinglr": "write schedule: {name: cosine}",
    "onecyclelr": "write schedule: {name: onecycle}",
    "warmup_stable_decay": "write schedule: {name: wsd}",
    "linearlr": "write schedule: {name: linear}",
    "constant_with_warmup": "write schedule: {name: constant, warmup_steps: …}",
    **dict.fromkeys(("step", "steplr"), "write schedule: {name: step, every_epochs: 30, factor: 0.1}"),
    **dict.fromkeys(("exponential", "exponentiallr"), "write schedule: {name: exponential, final: 0.01}"),
    **dict.fromkeys(
        ("reducelronplateau", "reduce_lr_on_plateau", "reduce_on_plateau"), "write schedule: {name: plateau}"
    ),
    "text": "write scheduler_fn: …; a function (optimizer) that returns a scheduler of torch",
}  # fmt: skip
_PRECISIONS = {
    **dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed", "16-true", "fp16-mixed"), "write precision: fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16-true"), "write precision: bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "32", "32-true", "no", "false"), "write precision: fp32"),
    **dict.fromkeys(("fp8", "64", "64-true", "float64", "double", "transformer-engine"),
                    "remove it, the values are auto, fp32, bf16 and fp16"),
}  # fmt: skip
_LOSSES = ("val_loss", "eval_loss", "loss")
_ACCURACIES = ("accuracy", "acc", "val_accuracy", "val_acc", "eval_accuracy")
_MEASURED = "if it is one of metrics, or a value of step_fn or evaluate_fn; or mode min, if lower is better"
_LOSS_FUNCTIONS = {
    name: f"write loss_fn: {function}"
    for function, names in {
        "mse_loss": "mse mseloss l2", "l1_loss": "mae l1 l1loss", "cross_entropy": "ce crossentropy crossentropyloss",
        "binary_cross_entropy": "bce bceloss", "nll_loss": "nll nllloss", "smooth_l1_loss": "smoothl1loss",
        "binary_cross_entropy_with_logits": "bcewithlogits bcewithlogitsloss", "huber_loss": "huber huberloss",
    }.items()
    for name in names.split()
}  # fmt: skip
_OTHER_OPTIMIZERS = (
    "lion", "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit", "lamb", "lars", "lomo", "adalomo",
    "ademamix", "ademamix_8bit", "galore_adamw", "grokadamw", "schedule_free_adamw", "schedule_free_sgd",
    "schedule_free_radam", "rmsprop_bnb", "rmsprop_bnb_8bit", "apollo_adamw", "stable_adamw",
)  # fmt: skip
_SAMPLES = "a number of samples"
_BEST = "checkpoint: {best: {metric: val_loss, mode: min}}"
_IN_STEPS = "a number of steps"
_ALL_ON_ONE_HOST = "the number of processes on each host"
_HOSTS = "if there are several hosts; otherwise remove it"

_TRACKERS = {
    **dict.fromkeys(("tensorboard", "true"), "remove it, TensorBoard's files are always written"),
    "all": "write log: {trackers: [wandb, mlflow]}",
    **{name: f"write log: {{trackers: {name}}}" for name in ("wandb", "mlflow")},
    "list": "write log: {trackers: …}; wandb, mlflow or both, TensorBoard's files are always written",
    "text": "write log: {trackers: …}; wandb, mlflow or the name of an installed sink",
    **dict.fromkeys(("none", "false"), "write log: {tensorboard: false}"),
}
_MONITORS = {
    **dict.fromkeys(_LOSSES, "write early_stop: {metric: val_loss}"),
    **dict.fromkeys(_ACCURACIES, "write early_stop: {metric: accuracy, mode: max}, metrics: accuracy"),
}
_UNLIMITED = "write num_epochs: 1000, max_steps: …; the run ends when the first limit is reached"

# Values of other libraries for keys that have the same name here.
VALUES: dict[str, Mapping[str, str]] = {
    "precision": _PRECISIONS,
    "max_steps": {"-1": "remove it, num_epochs ends the run"},
    "clip_norm": {
        "true": "write clip_norm: 1.0",
        "0": "remove it, gradients are not clipped by default",
        "false": REMOVE,
    },
    "ema": {"true": "write ema: 0.999", **_FALSE},
    "early_stop": {"true": "write early_stop: {patience: 5}", **_FALSE, **_MONITORS,
        "count": "write early_stop: {patience: VALUE}",
        "text": "write early_stop: {metric: …}; val_loss, or one of metrics with its mode"},
    "evaluate": {"true": BY_DEFAULT, "false": "write val_fraction: 0",
        "count": "write evaluate: {every_epochs: VALUE}; or every_steps",
        "fraction": f"write evaluate: {{every_steps: …}}; {_IN_STEPS}",
        "text": "write evaluate: {every_epochs: …}; or every_steps"},
    "checkpoint": {"true": BY_DEFAULT, "best": f"write {_BEST}", **dict.fromkeys(_LOSSES, f"write {_BEST}"),
        "false": "write checkpoint: {every_minutes: null}; checkpoints are saved only at a stop and at the end",
        "count": "write checkpoint: {every_steps: VALUE}; or every_minutes",
        "text": "write checkpoint: {every_minutes: 10}; or every_steps, keep and best"},
    "log": {**_TRACKERS, "count": "write log: {every_steps: VALUE}"},
    "loss_fn": _LOSS_FUNCTIONS,
    "num_epochs": {"-1": _UNLIMITED},
    "device": {"gpu": "write device: cuda", "cuda:0": "write device: cuda"},
    "resume": {"true": "write resume: auto", **_FALSE},
    "schedule.name": {name: text for name, text in _SCHEDULERS.items() if name not in (*SCHEDULES, "text")},
}  # fmt: skip

TABLE: dict[str, tuple[Row, ...]] = {
    "Optimizer and schedule": (
        Row("optimizer: {lr: VALUE}", transformers="learning_rate", others="lr base_lr"),
        Row("optimizer: {name: VALUE}", values={
            **dict.fromkeys(_ADAMW_NAMES, "write optimizer: {name: adamw}"), **dict.fromkeys(_OTHER_OPTIMIZERS,
            "write optimizer_fn: …; a function of the model that returns it, as torch does not have it")},
            transformers="optim", others="optimizer_name opt"),
        Row("optimizer: {weight_decay: VALUE}", transformers="weight_decay", others="wd"),
        Row("optimizer: {name: sgd, momentum: VALUE}", others="momentum"),
        Row("optimizer: {eps: VALUE}", transformers="adam_epsilon", others="eps"),
        Row("optimizer: {betas: VALUE}", others="betas"),
        Row("optimizer: {betas: [VALUE, 0.999]}", transformers="adam_beta1"),
        Row("optimizer: {betas: [0.9, VALUE]}", transformers="adam_beta2"),
        Row("optimizer_fn: VALUE", "a function of the model that returns the optimizer",
            lightning="configure_optimizers", transformers="optimizers optimizer_cls_and_kwargs"),
        Row("schedule: {name: VALUE}", "or scheduler_fn for torch's own", values=_SCHEDULERS,
            transformers="lr_scheduler_type", others="scheduler lr_scheduler lr_schedule"),
        Row("schedule: {warmup_steps: VALUE}", transformers="warmup_steps", others="num_warmup_steps warmup",
            values={"fraction": f"write schedule: {{warmup_steps: …}}; {_IN_STEPS}"}),
        Row("schedule: {warmup_steps: …}", _IN_STEPS, values=_FALSE, transformers="warmup_ratio",
            others="warmup_epochs"),
        Row("schedule: {name: step, every_epochs: 30, factor: VALUE}", others="gamma lr_decay"),
        Row("schedule: {name: step, every_epochs: VALUE}", others="step_size lr_step_size"),
        Row("scheduler_fn: VALUE", "a function of the optimizer that returns a scheduler", others="scheduler_cls"),
        Row("clip_norm: VALUE", values=VALUES["clip_norm"], lightning="gradient_clip_val", transformers="max_grad_norm",
            others="grad_clip clip_grad_norm max_norm"),
        Row("clip_norm: …", values={"norm": "remove it, clip_norm clips the norm of the gradient"},
            note="the norm of the gradient is clipped; to clip values, call run.step(optimizer, clip_value=…) in your "
            "own loop",
            lightning="gradient_clip_algorithm"),
        Row("ema: VALUE", "the decay, such as 0.999", values=VALUES["ema"],
            lightning="StochasticWeightAveraging", others="ema_decay use_ema swa"),
        Row("early_stop: {patience: VALUE}", values=VALUES["early_stop"], transformers="early_stopping_patience",
            lightning="patience", others="early_stopping"),
        Row("early_stop: {min_delta: VALUE}", lightning="min_delta", transformers="early_stopping_threshold"),
        Row("early_stop: {metric: VALUE, mode: max}", _MEASURED, values=_MONITORS, lightning="monitor"),
        Row("optimizer: {lr: VALUE}", "the highest rate of the schedule", others="max_lr"),
        Row("schedule: {name: cosine}", "which ends with the last step of the run", others="T_max t_max"),
        Row("schedule: {final: …, name: cosine}", "the last rate as a fraction of optimizer.lr",
            others="min_lr eta_min"),
        Row("scheduler_fn: …", "a function (optimizer) that returns torch's MultiStepLR", others="milestones"),
    ),
    "Epochs, steps and batches": (
        Row("num_epochs: VALUE",
            values={"decimal": "write num_epochs: …; a whole number of epochs",
            "-1": _UNLIMITED},
            lightning="max_epochs", transformers="num_train_epochs", others="epochs epoch n_epochs"),
        Row("max_steps: VALUE", values=VALUES["max_steps"],
            others="max_iters num_steps total_steps num_training_steps max_train_steps"),
        Row("max_steps: VALUE", values={"true": "write max_steps: 1; paceline doctor CONFIG also tries one step",
            **_FALSE}, lightning="fast_dev_run"),
        Row("max_steps: VALUE", "of the whole run", values={"1.0": BY_DEFAULT, **_FALSE,
            "fraction": f"write max_steps: …; {_IN_STEPS} of the whole run"},
            lightning="limit_train_batches overfit_batches"),
        Row(note="use fewer samples in val_df or val_dataset_fn", values={"1.0": BY_DEFAULT,
            "0": "write val_fraction: 0"}, lightning="limit_val_batches"),
        Row("time_limit: …", "in seconds, or as 1h30m", lightning="max_time"),
        Row("batch_size: VALUE", values={"text": f"write batch_size: …; {_SAMPLES}"},
            transformers="per_device_train_batch_size per_gpu_train_batch_size",
            others="bs train_batch_size micro_batch_size train_micro_batch_size_per_gpu"),
        Row("global_batch_size: VALUE, batch_size: …", "which divides it",
            values={"text": f"write global_batch_size: …, batch_size: …; {_SAMPLES}"},
            others="total_batch_size effective_batch_size"),
        Row("lanes: VALUE", times="procs", note="times the number of processes, whose micro-batches lanes counts",
            lightning="accumulate_grad_batches", transformers="gradient_accumulation_steps",
            accelerate="gradient_accumulation_steps", others="grad_accum_steps accumulation_steps"),
        Row("evaluate: {batch_size: VALUE}", transformers="per_device_eval_batch_size",
            others="eval_batch_size val_batch_size"),
        Row("evaluate: {every_steps: VALUE}", values={"1.0": "remove it, each epoch ends with an evaluation",
            "fraction": f"write evaluate: {{every_steps: …}}; {_IN_STEPS}"},
            lightning="val_check_interval", transformers="eval_steps",
            others="eval_interval eval_every"),
        Row("evaluate: {every_epochs: VALUE}", lightning="check_val_every_n_epoch"),
        Row("evaluate: {every_steps: …}", values={"epoch": "remove it, each epoch ends with an evaluation",
            **dict.fromkeys(("no", "false"), "write val_fraction: 0")},
            transformers="eval_strategy evaluation_strategy"),
        Row(note="remove it, metrics are tried on one batch before the first step", lightning="num_sanity_val_steps"),
    ),
    "Data": (
        Row("dataset_fn: VALUE", "a function that returns the data set",
            values={"table": "write df: VALUE; the table that dataset_fn gets"},
            lightning="datamodule train_dataloaders train_dataloader", transformers="train_dataset",
            others="dataset data train_data train_loader"),
        Row("val_dataset_fn: VALUE", "a function that returns the validation data",
            values={"table": "write val_df: VALUE; the table that dataset_fn gets for validation"},
            lightning="val_dataloaders val_dataloader", transformers="eval_dataset", others="val_dataset val_data"),
        Row("val_fraction: VALUE",
            values={"count": "write val_fraction: …; a fraction of the samples, less than 1"},
            others="val_split validation_split test_size valid_size"),
        Row(note="use it in dataset_fn or collate_fn", transformers="tokenizer processing_class"),
        Row("collate_fn: VALUE", transformers="data_collator", others="collate"),
        Row("workers: VALUE", transformers="dataloader_num_workers", others="num_workers n_workers"),
        Row("sample_weights: …", "or order_fn, a function (epoch, size) that returns indices",
            others="sampler weighted_sampler"),
        Row("order_fn: …, val_fraction: 0", "or val_df; order_fn is a function (epoch, size) that returns indices",
            transformers="group_by_length length_column_name", others="batch_sampler"),
        Row(note="remove it, the order of the samples changes in every epoch and each process gets its share",
            values={"false": "write order_fn: …, val_fraction: 0; a function (epoch, size) that returns range(size)"},
            others="shuffle"),
        Row(note="remove it, each process gets its share of the samples",
            lightning="use_distributed_sampler replace_sampler_ddp", others="distributed_sampler"),
        Row(note="remove it, every sample is used once in an epoch, and none is repeated",
            transformers="dataloader_drop_last", accelerate="even_batches", others="drop_last"),
        Row(note="remove it, batches are copied to the GPU while the step before runs",
            transformers="dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor",
            others="pin_memory persistent_workers prefetch_factor"),
        Row("seed: VALUE", values={"true": "write seed: 0", "false": REMOVE}, lightning="seed_everything",
            transformers="data_seed", others="random_seed manual_seed"),
    ),
    "Model and loss": (
        Row("model_fn: VALUE", "a function that returns the model", transformers="model model_init",
            others="net module"),
        Row("loss_fn: VALUE", values=_LOSS_FUNCTIONS, transformers="compute_loss_func",
            others="loss criterion loss_function objective"),
        Row("loss_fn: …", "a function with weight=VALUE in its cross_entropy; or sample_weights, which draws samples "
            "more often", others="class_weights class_weight"),
        Row("loss_fn: …", "a function with label_smoothing=VALUE in its cross_entropy", values=_FALSE,
            transformers="label_smoothing_factor", others="label_smoothing"),
        Row("metrics: …", "a dict of functions (output, target) by their names", values={
            **{name: f"write metrics: {name}" for name in ("accuracy", "mse", "mae")}, "acc": "write metrics: accuracy",
            "text": "write metrics: {VALUE: …}; a function (output, target) that returns a mean"},
            transformers="compute_metrics", others="metric"),
        Row("step_fn: VALUE", lightning="training_step", transformers="compute_loss"),
        Row("evaluate_fn: VALUE", lightning="validation_step", transformers="prediction_step"),
        Row("predict_fn: VALUE", lightning="predict_step"),
        Row("callbacks: […]", others="callback hooks"),
        Row("model_args: {num_classes: VALUE}", "if model_fn takes it", others="num_classes"),
        Row("model_args: …", "a section with the arguments of model_fn; there is dataset_args for those of dataset_fn",
            values={"section": "write model_args: VALUE; and dataset_args for arguments of dataset_fn"},
            others="hparams hyperparameters"),
        Row(note="call model.gradient_checkpointing_enable() in model_fn",
            transformers="gradient_checkpointing", others="activation_checkpointing"),
    ),
    "Precision and speed": (
        Row("precision: fp16", values=_FALSE, transformers="fp16", others="half use_fp16"),
        Row("precision: bf16", values=_FALSE, transformers="bf16", others="use_bf16"),
        Row("precision: auto", "the default: bf16 on GPUs that support it",
            values={"false": "write precision: fp32"}, others="amp use_amp autocast"),
        Row("precision: VALUE", values=_PRECISIONS, accelerate="mixed_precision", others="dtype torch_dtype"),
        Row("step_mode: compile", values=_FALSE, transformers="torch_compile",
            accelerate="dynamo_backend", others="compile use_compile"),
        Row("exact: VALUE", values={"true": BY_DEFAULT, "warn": BY_DEFAULT}, lightning="deterministic",
            transformers="full_determinism"),
        Row("exact: false", values={"false": BY_DEFAULT}, lightning="benchmark", others="cudnn_benchmark"),
        Row(note="run paceline profile CONFIG", lightning="profiler", others="profile"),
        Row("nan: stop", values=_FALSE, lightning="detect_anomaly terminate_on_nan"),
        Row("shard_optimizer: true", "which divides the optimizer state among the processes", values=_FALSE,
            transformers="fsdp deepspeed fsdp_config", accelerate="fsdp_plugin deepspeed_plugin", others="zero_stage"),
    ),
    "Checkpoints and results": (
        Row("checkpoint: {every_steps: VALUE}", values={"0": "remove it, checkpoints are saved in the background",
            **dict.fromkeys(("text", "fraction"), f"write checkpoint: {{every_steps: …}}; {_IN_STEPS}")},
            lightning="every_n_train_steps", transformers="save_steps",
            others="checkpointing_steps save_every save_interval"),
        Row("checkpoint: {every_steps: …}", "or every_minutes", values={"best": f"write {_BEST}",
            **dict.fromkeys(("no", "false"), "remove it, checkpoints are saved in the background")},
            transformers="save_strategy"),
        Row("checkpoint: {every_minutes: …}", lightning="train_time_interval"),
        Row("checkpoint: {keep: VALUE}", "the number of the newest ones", values={
            "0": "remove it, the newest is always kept", "-1": "write checkpoint: {keep: …}; a large number keeps all"},
            lightning="save_top_k", transformers="save_total_limit", accelerate="total_limit"),
        Row("checkpoint: {best: {metric: VALUE, mode: max}}", _MEASURED, values={
            **dict.fromkeys(_LOSSES, f"write {_BEST}"), **dict.fromkeys(_ACCURACIES,
            "write checkpoint: {best: {metric: accuracy, mode: max}}, metrics: accuracy")},
            transformers="metric_for_best_model", lightning="monitor"),
        Row("checkpoint: {best: {mode: max, metric: …}}", values={
            "false": "write checkpoint: {best: {mode: min, metric: …}}"}, transformers="greater_is_better"),
        Row(_BEST, values=_FALSE,
            transformers="load_best_model_at_end", others="save_best save_best_only"),
        Row(note="remove it, checkpoints are saved every 10 minutes, at a stop and at the end",
            lightning="enable_checkpointing", others="checkpointing"),
        Row("resume: VALUE", values=dict.fromkeys(("true", "last", "latest"), "write resume: auto") | _FALSE,
            lightning="ckpt_path", transformers="resume_from_checkpoint", others="resume_from checkpoint_path"),
        Row("run_dir: VALUE", "the folder of this run, not of several runs; the default is runs/NAME/TIME",
            lightning="default_root_dir", transformers="output_dir logging_dir",
            accelerate="project_dir", others="save_dir log_dir out_dir work_dir"),
        Row("name: VALUE", transformers="run_name", others="experiment_name exp_name project project_name"),
        Row("log: {trackers: VALUE}", values=_TRACKERS,
            lightning="logger", transformers="report_to", accelerate="log_with", others="tracker"),
        Row("log: {trackers: wandb}", values=_FALSE, others="wandb use_wandb wandb_project"),
        Row("log: {trackers: mlflow}", values=_FALSE, others="mlflow use_mlflow"),
        Row("log: {tensorboard: true}", values={"false": "write log: {tensorboard: false}", "true": BY_DEFAULT},
            others="tensorboard use_tensorboard"),
        Row("log: {every_steps: VALUE}", values={"0": "remove it, the first steps are logged, then fewer of them",
            "fraction": f"write log: {{every_steps: …}}; {_IN_STEPS}"},
            lightning="log_every_n_steps", transformers="logging_steps",
            others="log_every log_interval"),
        Row(note="run paceline export RUN --format hf", transformers="push_to_hub hub_model_id"),
        Row(note="remove it, terminals show a live view and files get plain lines",
            lightning="enable_progress_bar enable_model_summary", transformers="disable_tqdm", others="verbose"),
    ),
    "Processes and machines": (
        Row("procs: VALUE", _ALL_ON_ONE_HOST,
            values={**dict.fromkeys(("auto", "-1", "gpu"),
            "remove it, the default is one process for each GPU"), "0": "write device: cpu",
            **dict.fromkeys(("list", "text"),
            "write procs: …; the number of processes, CUDA_VISIBLE_DEVICES selects their GPUs")}, lightning="devices",
            others="nproc_per_node gpus num_gpus n_gpus nproc "
            "gpus_per_node num_procs"),
        Row("procs: VALUE", "if all are on one host; else procs is " + _ALL_ON_ONE_HOST, unless="nodes",
            accelerate="num_processes", others="world_size"),
        Row("nodes: VALUE, rendezvous: HOST:29400", values={"1": REMOVE}, lightning="num_nodes",
            accelerate="num_machines", others="nnodes n_nodes"),
        Row("rendezvous: VALUE, nodes: …", _HOSTS, others="rdzv_endpoint"),
        Row("rendezvous: VALUE:29400, nodes: …", _HOSTS, accelerate="main_process_ip", others="master_addr"),
        Row("rendezvous: HOST:VALUE, nodes: …", _HOSTS, accelerate="main_process_port", others="master_port"),
        Row("rendezvous: HOST:29400, nodes: …", _HOSTS, others="init_method dist_url"),
        Row(note="remove it, ranks are assigned automatically; run.rank contains it", transformers="local_rank",
            accelerate="machine_rank", others="node_rank rank local_process_index"),
        Row("device: VALUE", values={"auto": BY_DEFAULT,
            **dict.fromkeys(("gpu", "cuda"), "write device: cuda"), "cpu": "write device: cpu",
            "text": "remove it, the devices are cuda and cpu"}, lightning="accelerator"),
        Row("device: cpu", values=_FALSE, transformers="use_cpu no_cuda", accelerate="cpu"),
        Row("device: cuda", values={"false": "write device: cpu"}, others="cuda use_cuda gpu"),
        Row(note="set CUDA_VISIBLE_DEVICES=VALUE in the environment", accelerate="gpu_ids", others="gpu_id device_ids"),
        Row("find_unused_parameters: VALUE", transformers="ddp_find_unused_parameters"),
        Row("bucket_mb: VALUE", transformers="ddp_bucket_cap_mb", others="bucket_cap_mb"),
        Row("backend: VALUE", values={"nccl": "write backend: nccl", "gloo": "write backend: gloo",
            "text": "remove it, the backends are nccl and gloo"}, transformers="ddp_backend",
            others="dist_backend distributed_backend"),
        Row("hang_timeout_s: VALUE", transformers="ddp_timeout", others="timeout"),
        Row(note="remove it, several processes train with DDP; for large models, see the key shard_optimizer",
            values={"ddp_find_unused_parameters_true": "write find_unused_parameters: true"},
            lightning="strategy", others="distributed distributed_type"),
        Row("sync_batchnorm: true, exact: false", values=_FALSE, others="sync_bn"),
    ),
}  # fmt: skip
