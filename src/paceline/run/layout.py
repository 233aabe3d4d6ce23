"""Names every file of a run folder, and checks which of them exist. Creates and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path


class RunFolder:
    """The paths of all files that a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.job = path / "job.bin"
        self.events = path / "events.jsonl"
        self.logs = path / "logs"
        self.hang = self.logs / "hang.txt"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.stopped = self.logs / "stopped.json"
        self.mirror_state = self.logs / "mirror.json"  # what is still to be copied to the mirror
        self.request = self.logs / "request"  # a signal for ranks that the launcher has not started itself
        self.ray = path / ".ray"  # files of Ray Train
        self.lock = path / ".lock"
        self.mirror = path / "mirror.json"  # where the run is mirrored
        self.fetched = path / ".fetched"  # the mirror it was downloaded from, until the run is trained here
        self.weights = path / "weights.safetensors"
        self.rank_0_weights = path / "weights-rank-0.safetensors"  # if the ranks differ at the end of train_fn
        self.ema = path / "ema.safetensors"
        self.value = path / "value.json"  # the value that rank 0 returned to the caller of this start
        self.pickled_value = path / "value.pkl"  # the same, for a value that JSON cannot represent exactly
        self.result = path / "result.json"
        self.metrics = path / "metrics.json"  # of an evaluation
        self.profile = path / "profile"
        self.report = path / "report.html"
        self.comparison = path / "comparison.html"  # the report of this run and others
        self.slurm = path / "slurm.json"
        self.job_script = path / "slurm.sh"
        self.job_log = self.logs / "slurm.log"
        self.manifest = path / "kubernetes.yaml"

    def log(self, rank: int | str) -> Path:
        """The log of one rank: its output to stdout and stderr."""
        return self.logs / f"rank-{rank}.log"

    def image(self, name: str, step: int) -> Path:
        """An image that was logged at a step."""
        return self.path / "images" / f"{name.replace('/', '-')}-{step:08d}.png"

    def trace(self, rank: int) -> Path:
        """The profile of a few steps of one rank, in the format of Perfetto."""
        return self.profile / f"rank-{rank}.json.gz"

    def tracker(self, name: str) -> Path:
        """The state of a tracker such as W&B, with which a resumed run continues the same record."""
        return self.path / f"{name}.json"

    def tracker_log(self, name: str) -> Path:
        """The output of a tracker's process."""
        return self.logs / f"{name}.log"

    def failure(self, rank: int) -> Path:
        """The failure that a rank recorded before it ended."""
        return self.logs / f"rank-{rank}.failure.json"

    def place(self, rank: int | str) -> Path:
        """The code position that a rank last recorded, for other processes to read."""
        return self.logs / f"rank-{rank}.place.json"

    def holds_run(self) -> bool:
        """Whether this is the folder of a run, including a run that was only submitted."""
        return any(path.exists() for path in (self.config, self.slurm, self.manifest))

    def has_checkpoints(self) -> bool:
        """Whether the folder has checkpoints, valid or not."""
        return any(self.checkpoints.glob("step-*"))

    def has_result(self) -> bool:
        """Whether the run has finished and its result can be read."""
        try:
            return isinstance(json.loads(self.result.read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            return False

    def has_ending(self) -> bool:
        """Whether rank 0 has written a result, a value, or the reason why it stopped."""
        return any(path.exists() for path in (self.result, self.value, self.pickled_value, self.stopped))


def newest_run_below(top: Path) -> Path | None:
    """The run folder among `top/<name>/<date-time>` that has trained last; its later use for predictions is no part."""
    found = [path for path in top.glob("*/*") if RunFolder(path).holds_run()]
    return max(found, key=_last_trained, default=None)


def _last_trained(path: Path) -> float:
    events = RunFolder(path).events
    return (events if events.exists() else path).stat().st_mtime
