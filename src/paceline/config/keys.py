"""Names of keys by their kind, and by the loops and commands that use them."""

from __future__ import annotations

FUNCTION_KEYS = (
    "model_fn", "dataset_fn", "val_dataset_fn", "collate_fn", "train_fn", "loss_fn", "step_fn", "evaluate_fn",
    "predict_fn", "optimizer_fn", "schedule_fn", "scheduler_fn", "difficulty_fn", "order_fn",
)  # fmt: skip
TABLE_KEYS = ("df", "val_df")
NAMED_SECTIONS = ("optimizer", "schedule")  # may be given only by name
MANAGED_KEYS = (  # have no effect on a train_fn without `run`
    "metrics", "optimizer", "optimizer_fn", "schedule", "schedule_fn", "scheduler_fn", "early_stop", "evaluate",
    "clip_norm", "ema", "max_steps", "lanes", "global_batch_size", "precision", "exact", "check_replicas_every",
    "checkpoint", "time_limit", "nan", "nan_limit", "augment",
    "curriculum", "difficulty_fn", "callbacks", "step_mode", "data_on_device", "compression", "shard_optimizer",
)  # fmt: skip
OWN_LOOP_KEYS = (  # belong to the managed loop, but also work in a train_fn with `run`
    "clip_norm", "ema", "max_steps", "lanes", "global_batch_size", "precision", "exact", "check_replicas_every",
    "checkpoint", "time_limit", "nan", "nan_limit", "augment", "curriculum", "difficulty_fn", "callbacks",
    "data_on_device", "early_stop",
)  # fmt: skip
EVALUATION_KEYS = ("loss_fn", "metrics")  # are used by `evaluate` after a train_fn with `run`
# Keys that do not affect the results of a run, only how and where it is executed.
EXECUTION_KEYS = {
    "name", "run_dir", "launcher", "procs", "nodes", "rendezvous", "max_restarts", "hang_timeout_s", "device",
    "backend", "log", "checkpoint", "resume", "time_limit", "workers", "nan_limit", "check_replicas_every", "ddp",
    "bucket_mb", "static_graph", "lanes", "global_batch_size", "threads", "data_on_device", "shard_optimizer", "folder",
    "predict_fn",
}  # fmt: skip
