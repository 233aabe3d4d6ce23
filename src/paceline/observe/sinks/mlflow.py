"""MLflow. Its own environment variables decide where a run goes: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

from itertools import islice
from typing import Any

from paceline.config import dotted_items
from paceline.observe.event_types import Event
from paceline.observe.sinks.tracker import Ending, Tracker

STATUSES: dict[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
PARAM_LENGTH, PARAMS_AT_ONCE, METRICS_AT_ONCE = 500, 100, 1000  # what MLflow's servers take


class MlflowRun(Tracker):
    """A run of MLflow, in an experiment that has the name of the config."""

    name = "mlflow"

    def open(self, name: str, config: dict[str, Any], known: str | None) -> str:
        """Begin a run, or go on with the one that is `known`; its id."""
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        self._client, self._waiting = MlflowClient(), list[Any]()
        if known is None:
            experiment = MLFLOW_EXPERIMENT_NAME.get() or name
            found = self._client.get_experiment_by_name(experiment)
            where = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            known = str(self._client.create_run(where, run_name=self.folder.path.name).info.run_id)
        self._run = known
        self._client.update_run(known, status="RUNNING")
        self._log_params(dict(dotted_items(config)))
        return known

    def log(self, event: Event, numbers: dict[str, float]) -> None:
        """Take the numbers of an event."""
        from mlflow.entities import Metric

        at = int(1000 * event["time"])
        self._waiting += [Metric(name, value, at, event["step"]) for name, value in numbers.items()]

    def send(self) -> None:
        """Send what was taken, many numbers at once."""
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:METRICS_AT_ONCE])
            del self._waiting[:METRICS_AT_ONCE]

    def end(self, ending: Ending) -> None:
        """Close the run."""
        self._client.set_terminated(self._run, STATUSES[ending])

    def _log_params(self, params: dict[str, Any]) -> None:
        """The config; a param that MLflow has stays as it is, it cannot be changed there."""
        from mlflow.entities import Param

        there = self._client.get_run(self._run).data.params
        new = (Param(key, str(value)[:PARAM_LENGTH]) for key, value in params.items() if key not in there)
        while some := list(islice(new, PARAMS_AT_ONCE)):
            self._client.log_batch(self._run, params=some)
