"""The names that Lightning, transformers, Accelerate, torchrun and scripts have for the keys of a config.

The table answers unknown keys (`messages.py`) and is printed in docs/coming_from.md, which a test compares with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.config.yaml import parse

REMOVE = "remove it"
BY_DEFAULT = "remove it, this is the default"


class Row(NamedTuple):
    """What one or more names of other libraries, separated by spaces, are here."""

    write: str = ""  # YAML; VALUE stands for the user's value. Empty: there is no such key
    note: str = ""
    values: Mapping[str, str] = {}  # the whole advice for some values, in lower case
    lightning: str = ""
    transformers: str = ""
    accelerate: str = ""
    others: str = ""  # torchrun, and what people call it in their own scripts

    @property
    def names(self) -> list[str]:
        """All names of the row."""
        return " ".join((self.lightning, self.transformers, self.accelerate, self.others)).split()

    @property
    def key(self) -> str:
        """The key here, such as optimizer.lr: the first one in `write`."""
        path, value = [], parse(self.write) if self.write else None
        while isinstance(value, dict):
            name, value = next(iter(value.items()))
            path.append(name)
        return ".".join(path)

    def advice(self, value: Any) -> str:
        """What to do instead of giving this value under one of the row's names."""
        special = self.values.get(str(value).lower()) if isinstance(value, (str, int, float)) else None
        written = f"write {self.write}" if self.write else ""
        return (special or ", ".join(filter(None, (written, self.note)))).replace("VALUE", _as_yaml(value))


def advice_for(sections: Sequence[str], name: str, value: Any) -> str | None:
    """The rest of a sentence about an unknown key, "is called … here; write …"; None if the table does not have it."""
    own = ".".join((*sections, name))
    rows = [row for row in rows_of(name) if row.key != own]
    rows.sort(key=lambda row: not row.key.startswith(".".join((*sections, ""))))  # keys of the same section first
    if not rows:
        return None
    called = f"is called {rows[0].key} here" if rows[0].key else "is not a key here"
    return f"{called}; {rows[0].advice(value)}"


def rows_of(name: str) -> list[Row]:
    """The rows of the table that have a name."""
    return [row for rows in TABLE.values() for row in rows if name in row.names]


def _as_yaml(value: Any) -> str:
    """A simple value as in a config; an ellipsis for any other."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (str, int, float)) and len(str(value)) <= 60 else "…"


_ADAMW_NAMES = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_SCHEDULERS = {
    "cosineannealinglr": "cosine", "onecyclelr": "onecycle", "steplr": "step", "exponentiallr": "exponential",
    "reducelronplateau": "plateau", "reduce_lr_on_plateau": "plateau", "warmup_stable_decay": "wsd",
}  # fmt: skip
_ALL_ON_ONE_HOST = "the number of processes on each host"

TABLE: dict[str, tuple[Row, ...]] = {
    "Optimizer and schedule": (
        Row("optimizer: {lr: VALUE}", transformers="learning_rate", others="lr base_lr"),
        Row("optimizer: {name: VALUE}", values=dict.fromkeys(_ADAMW_NAMES, "write optimizer: {name: adamw}"),
            transformers="optim", others="optimizer_name opt"),
        Row("optimizer: {weight_decay: VALUE}", transformers="weight_decay", others="wd"),
        Row("optimizer: {momentum: VALUE}", others="momentum"),
        Row("optimizer: {eps: VALUE}", transformers="adam_epsilon"),
        Row("optimizer: {betas: [VALUE, 0.999]}", transformers="adam_beta1"),
        Row("optimizer: {betas: [0.9, VALUE]}", transformers="adam_beta2"),
        Row("optimizer_fn: VALUE", "a function of the model that returns the optimizer",
            lightning="configure_optimizers", transformers="optimizers optimizer_cls_and_kwargs"),
        Row("schedule: {name: VALUE}", "or scheduler_fn for torch's own", values={
            "constant_with_warmup": "write schedule: {warmup_steps: …}",
            **{name: f"write schedule: {{name: {ours}}}" for name, ours in _SCHEDULERS.items()}},
            transformers="lr_scheduler_type", others="scheduler lr_scheduler lr_schedule"),
        Row("schedule: {warmup_steps: VALUE}", transformers="warmup_steps", others="num_warmup_steps warmup"),
        Row("schedule: {warmup_fraction: VALUE}", transformers="warmup_ratio"),
        Row("schedule: {factor: VALUE}", others="gamma lr_decay"),
        Row("schedule: {every_epochs: VALUE}", others="step_size lr_step_size"),
        Row("scheduler_fn: VALUE", "a function of the optimizer that returns a scheduler", others="scheduler_cls"),
        Row("clip_norm: VALUE", lightning="gradient_clip_val", transformers="max_grad_norm",
            others="grad_clip clip_grad_norm max_norm"),
        Row("clip_norm: …", values={"norm": "remove it, clip_norm clips the norm of the gradient"},
            note="the norm of the gradient is clipped; to clip values, call clip_grad_value_ in a loop of your own",
            lightning="gradient_clip_algorithm"),
        Row("ema: VALUE", "the decay, such as 0.999", values={"true": "write ema: 0.999"},
            lightning="StochasticWeightAveraging", others="ema_decay use_ema swa"),
        Row("early_stop: {patience: VALUE}", transformers="early_stopping_patience",
            lightning="patience", others="early_stopping"),
        Row("early_stop: {min_delta: VALUE}", lightning="min_delta", transformers="early_stopping_threshold"),
        Row("early_stop: {metric: VALUE}", lightning="monitor"),
    ),
    "Epochs, steps and batches": (
        Row("num_epochs: VALUE", values={"-1": "write max_steps: …, and num_epochs: as many as that takes"},
            lightning="max_epochs", transformers="num_train_epochs", others="epochs n_epochs"),
        Row("max_steps: VALUE", others="max_iters num_steps total_steps num_training_steps max_train_steps"),
        Row("max_steps: VALUE", values={"true": "write max_steps: 1; paceline doctor CONFIG also tries one step",
            "false": REMOVE}, lightning="fast_dev_run"),
        Row("max_steps: VALUE", "of the whole run", values={"1.0": BY_DEFAULT, "1": BY_DEFAULT},
            lightning="limit_train_batches overfit_batches"),
        Row("val_fraction: 0", "or give fewer samples in val_df", values={"1.0": BY_DEFAULT, "1": BY_DEFAULT},
            lightning="limit_val_batches"),
        Row("time_limit: VALUE", lightning="max_time"),
        Row("batch_size: VALUE", transformers="per_device_train_batch_size per_gpu_train_batch_size",
            others="train_batch_size micro_batch_size train_micro_batch_size_per_gpu"),
        Row("global_batch_size: VALUE", others="total_batch_size effective_batch_size"),
        Row("lanes: VALUE", "times the number of processes, whose micro-batches it counts",
            lightning="accumulate_grad_batches", transformers="gradient_accumulation_steps",
            accelerate="gradient_accumulation_steps", others="grad_accum_steps accumulation_steps"),
        Row("evaluate: {batch_size: VALUE}", transformers="per_device_eval_batch_size",
            others="eval_batch_size val_batch_size"),
        Row("evaluate: {every_steps: VALUE}", lightning="val_check_interval", transformers="eval_steps",
            others="eval_interval eval_every"),
        Row("evaluate: {every_epochs: VALUE}", lightning="check_val_every_n_epoch"),
        Row("evaluate: {every_steps: …}", values={"epoch": "remove it, each epoch ends with an evaluation",
            "no": "write val_fraction: 0"}, transformers="eval_strategy evaluation_strategy"),
        Row(note="remove it, metrics are tried on one batch before the first step", lightning="num_sanity_val_steps"),
    ),
    "Data": (
        Row("dataset_fn: VALUE", "a function that returns the data set",
            lightning="datamodule train_dataloaders train_dataloader", transformers="train_dataset",
            others="dataset data train_data train_loader"),
        Row("val_dataset_fn: VALUE", "a function that returns the validation data",
            lightning="val_dataloaders val_dataloader", transformers="eval_dataset", others="val_dataset val_data"),
        Row("collate_fn: VALUE", transformers="data_collator", others="collate"),
        Row("workers: VALUE", transformers="dataloader_num_workers", others="num_workers n_workers"),
        Row("sample_weights: …", "or order_fn: a function (epoch, size) that returns indices",
            others="sampler weighted_sampler class_weights"),
        Row("order_fn: …", "a function (epoch, size) that returns indices",
            transformers="group_by_length length_column_name", others="batch_sampler"),
        Row(note="remove it, the order of the samples changes in every epoch and each process gets its share",
            lightning="use_distributed_sampler replace_sampler_ddp", others="shuffle distributed_sampler"),
        Row(note="remove it, every sample is used once in an epoch, and none is repeated",
            transformers="dataloader_drop_last", accelerate="even_batches", others="drop_last"),
        Row(note="remove it, batches are copied to the GPU while the step before runs",
            transformers="dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor",
            others="pin_memory persistent_workers prefetch_factor"),
        Row("seed: VALUE", values={"true": "write seed: 0"}, lightning="seed_everything", transformers="data_seed",
            others="random_seed manual_seed"),
    ),
    "Model and loss": (
        Row("model_fn: …", "a function that returns the model", transformers="model model_init", others="net module"),
        Row("loss_fn: VALUE", transformers="compute_loss_func", others="loss criterion loss_function objective"),
        Row("loss_fn: …", "a function with label_smoothing=VALUE in its cross_entropy",
            transformers="label_smoothing_factor", others="label_smoothing"),
        Row("metrics: VALUE", transformers="compute_metrics", others="metric"),
        Row("step_fn: VALUE", lightning="training_step", transformers="compute_loss"),
        Row("evaluate_fn: VALUE", lightning="validation_step", transformers="prediction_step"),
        Row("predict_fn: VALUE", lightning="predict_step"),
        Row("callbacks: VALUE", others="callback hooks"),
        Row(note="call model.gradient_checkpointing_enable() in model_fn",
            transformers="gradient_checkpointing", others="activation_checkpointing"),
    ),
    "Precision and speed": (
        Row("precision: fp16", values={"false": REMOVE}, transformers="fp16", others="half use_fp16"),
        Row("precision: bf16", values={"false": REMOVE}, transformers="bf16", others="use_bf16"),
        Row("precision: auto", "the default, which is bf16 on GPUs that support it",
            values={"false": "write precision: fp32"}, others="amp use_amp autocast"),
        Row("precision: VALUE", values={"no": "write precision: fp32"}, accelerate="mixed_precision", others="dtype"),
        Row("step_mode: compile", values={"false": REMOVE}, transformers="torch_compile",
            accelerate="dynamo_backend", others="compile use_compile"),
        Row("exact: VALUE", values={"true": BY_DEFAULT, "warn": BY_DEFAULT}, lightning="deterministic",
            transformers="full_determinism"),
        Row("exact: false", values={"false": BY_DEFAULT}, lightning="benchmark", others="cudnn_benchmark"),
        Row(note="run paceline profile CONFIG", lightning="profiler", others="profile"),
        Row("nan: stop", values={"false": REMOVE}, lightning="detect_anomaly terminate_on_nan"),
        Row("shard_optimizer: true", "which divides the optimizer state among the processes",
            transformers="fsdp deepspeed fsdp_config", accelerate="fsdp_plugin deepspeed_plugin", others="zero_stage"),
    ),
    "Checkpoints and results": (
        Row("checkpoint: {every_steps: VALUE}", lightning="every_n_train_steps", transformers="save_steps",
            others="checkpointing_steps save_every save_interval"),
        Row("checkpoint: {every_steps: …}", "or every_minutes", values={"no": "remove it, a checkpoint costs no time"},
            transformers="save_strategy"),
        Row("checkpoint: {every_minutes: VALUE}", lightning="train_time_interval"),
        Row("checkpoint: {keep: VALUE}", lightning="save_top_k", transformers="save_total_limit",
            accelerate="total_limit"),
        Row("checkpoint: {best: {metric: VALUE, mode: min}}", "or mode: max", transformers="metric_for_best_model",
            lightning="monitor"),
        Row("checkpoint: {best: {mode: max}}", "with its metric", values={"false":
            "write checkpoint: {best: {mode: min}}, with its metric"}, transformers="greater_is_better"),
        Row("checkpoint: {best: {metric: val_loss, mode: min}}", values={"false": REMOVE},
            transformers="load_best_model_at_end", others="save_best save_best_only"),
        Row(note="remove it, checkpoints are saved every 10 minutes, at a stop and at the end",
            lightning="enable_checkpointing", others="checkpointing"),
        Row("resume: VALUE", values=dict.fromkeys(("true", "last", "latest"), "write resume: auto"),
            lightning="ckpt_path", transformers="resume_from_checkpoint", others="resume_from checkpoint_path"),
        Row("run_dir: VALUE", lightning="default_root_dir", transformers="output_dir logging_dir",
            accelerate="project_dir", others="save_dir log_dir out_dir work_dir"),
        Row("name: VALUE", transformers="run_name", others="experiment_name exp_name project project_name"),
        Row("log: {trackers: VALUE}", values={
            "tensorboard": "remove it, TensorBoard's files are always written",
            "true": "remove it, TensorBoard's files are always written",
            "all": "write log: {trackers: [wandb, mlflow]}",
            **dict.fromkeys(("none", "false"), "write log: {tensorboard: false}")},
            lightning="logger", transformers="report_to", accelerate="log_with", others="tracker"),
        Row("log: {every_steps: VALUE}", lightning="log_every_n_steps", transformers="logging_steps",
            others="log_every log_interval"),
        Row(note="run paceline export RUN --format hf", transformers="push_to_hub hub_model_id"),
        Row(note="remove it, a terminal shows the live view and a file gets plain lines",
            lightning="enable_progress_bar enable_model_summary", transformers="disable_tqdm"),
    ),
    "Processes and machines": (
        Row("procs: VALUE", _ALL_ON_ONE_HOST, values=dict.fromkeys(("auto", "-1"), "remove it, the default is one "
            "process for each GPU"), lightning="devices", others="nproc_per_node gpus num_gpus n_gpus nproc "
            "gpus_per_node num_procs"),
        Row("procs: VALUE", "if all are on one host; else procs is " + _ALL_ON_ONE_HOST, accelerate="num_processes",
            others="world_size"),
        Row("nodes: VALUE", "with rendezvous: HOST:PORT", values={"1": REMOVE}, lightning="num_nodes",
            accelerate="num_machines", others="nnodes n_nodes"),
        Row("rendezvous: VALUE", "as HOST:PORT", accelerate="main_process_ip main_process_port",
            others="rdzv_endpoint master_addr master_port init_method dist_url"),
        Row(note="remove it, the processes agree on their ranks; run.rank has it", transformers="local_rank",
            accelerate="machine_rank", others="node_rank rank local_process_index"),
        Row("device: VALUE", values={"gpu": "write device: cuda", "auto": BY_DEFAULT}, lightning="accelerator"),
        Row("device: cpu", values={"false": REMOVE}, transformers="use_cpu no_cuda", accelerate="cpu"),
        Row("device: cuda", values={"false": "write device: cpu"}, others="cuda use_cuda gpu"),
        Row(note="set CUDA_VISIBLE_DEVICES=VALUE in the environment", accelerate="gpu_ids", others="gpu_id device_ids"),
        Row("find_unused_parameters: VALUE", transformers="ddp_find_unused_parameters"),
        Row("bucket_mb: VALUE", transformers="ddp_bucket_cap_mb", others="bucket_cap_mb"),
        Row("backend: VALUE", transformers="ddp_backend", others="dist_backend distributed_backend"),
        Row("hang_timeout_s: VALUE", transformers="ddp_timeout", others="timeout"),
        Row(note="remove it, several processes train with DDP; for large models write shard_optimizer: true",
            values={"ddp_find_unused_parameters_true": "write find_unused_parameters: true"},
            lightning="strategy", others="distributed distributed_type"),
        Row("sync_batchnorm: VALUE", others="sync_bn"),
    ),
}  # fmt: skip
