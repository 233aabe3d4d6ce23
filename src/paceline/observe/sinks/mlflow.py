"""MLflow. Its own environment variables decide where a run is stored: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

from itertools import islice
from typing import Any

from paceline.config import dotted_items
from paceline.observe.event_types import Event
from paceline.observe.sinks.tracker import RunEnding, TrackerSink

STATUSES: dict[RunEnding, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
PARAM_LENGTH, PARAMS_AT_ONCE, METRICS_AT_ONCE = 500, 100, 1000  # limits of the MLflow server


class MlflowSink(TrackerSink):
    """A run of MLflow, in an experiment that has the config's `name`."""

    name = "mlflow"

    def open(self, project: str, config: dict[str, Any], run_id: str | None) -> str:
        """Create a run in the experiment `project`, or reopen the one with `run_id`; return its id."""
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        self._client, self._unsent = MlflowClient(), list[Any]()
        if run_id is None:
            name = MLFLOW_EXPERIMENT_NAME.get() or project
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
            run_id = str(self._client.create_run(experiment, run_name=self.run_dir.name).info.run_id)
        self._run = run_id
        self._client.update_run(run_id, status="RUNNING")
        self._log_params(dict(dotted_items(config)))
        return run_id

    def log(self, event: Event, numbers: dict[str, float]) -> None:
        """Log the numbers of an event; `send` sends them."""
        from mlflow.entities import Metric

        time_ms = int(1000 * event["time"])
        self._unsent += [Metric(name, value, time_ms, event["step"]) for name, value in numbers.items()]

    def send(self) -> None:
        """Send what was logged, in batches."""
        while self._unsent:
            self._client.log_batch(self._run, metrics=self._unsent[:METRICS_AT_ONCE])
            del self._unsent[:METRICS_AT_ONCE]

    def end(self, ending: RunEnding) -> None:
        """End the run."""
        self._client.set_terminated(self._run, STATUSES[ending])

    def _log_params(self, params: dict[str, Any]) -> None:
        """Send the config; params that MLflow already has are skipped, since MLflow does not allow changes."""
        from mlflow.entities import Param

        existing = self._client.get_run(self._run).data.params
        new = (Param(key, str(value)[:PARAM_LENGTH]) for key, value in params.items() if key not in existing)
        while batch := list(islice(new, PARAMS_AT_ONCE)):
            self._client.log_batch(self._run, params=batch)
