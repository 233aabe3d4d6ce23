"""The search and its study, with simulated runs: trials are pruned, fail, are stopped and resumed."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from paceline.errors import ConfigError, Interrupted  # noqa: E402
from paceline.tools.tune.goal import Goal  # noqa: E402
from paceline.tools.tune.ledger import TrialLedger  # noqa: E402
from paceline.tools.tune.report import write_plots  # noqa: E402
from paceline.tools.tune.search import Search  # noqa: E402
from paceline.tools.tune.space import parse  # noqa: E402
from paceline.tools.tune.study import Candidate, Study, make_pruner, make_sampler  # noqa: E402
from paceline.tools.tune.worker import TrialOutcome  # noqa: E402

GOAL = Goal("val_loss", "min")
RANGE = "optimizer.lr=log:1e-4:1e-1"


class SimulatedRun:
    """A run that reports one value at each look, then ends as given, or when it is asked to stop."""

    seconds = 1.0

    def __init__(
        self, values: Sequence[float | None] = (0.5,), end: TrialOutcome | None = None, lasting: bool = False
    ) -> None:
        self.history = [{"event": "epoch", "epoch": n, "val_loss": value} for n, value in enumerate(values, start=1)]
        self.reported = 0
        self.end = end or TrialOutcome("done", history=self.history)
        self.is_lasting, self.stops = lasting, 0

    def epochs(self) -> Iterator[dict[str, Any]]:
        new, self.reported = self.history[self.reported : self.reported + 1], min(self.reported + 1, len(self.history))
        yield from new

    def stop(self) -> None:
        self.stops += 1

    def outcome(self) -> TrialOutcome | None:
        if self.stops:
            return TrialOutcome("stopped")
        return self.end if self.reported == len(self.history) and not self.is_lasting else None


def study(words: Sequence[str] = (RANGE,), *, storage: str = "sqlite:///:memory:", **options: Any) -> Study:
    settings: dict[str, Any] = {"home": "here", "sampler": "random", **options}
    return Study("lab", storage, parse(words)[0], GOAL, **settings)


def kept_study(**options: Any) -> Study:
    """A study that can be opened again."""
    return study(storage=f"sqlite:///{Path.cwd()}/study.db", **options)


def run(
    start: Callable[[Candidate, int], SimulatedRun], of: Study, total: int = 3, parallel: int = 1, **options: Any
) -> tuple[bool, list[str]]:
    """Search without waiting; returns whether it ended by itself, and the logged lines."""
    logged: list[str] = []
    ledger = TrialLedger(of, total, logged.append, **options)
    return Search(ledger, parallel, start, poll_s=0.0).run(), logged


def states(of: Study) -> list[str]:
    return [row.state for row in of.rows()]


def test_trials_are_reported_to_the_study_until_it_has_enough() -> None:
    lab = study(["optimizer.lr=log:1e-4:1e-1", "model_args.widths=[64,64]", "model_args.widths=[8]", "n=int:1:3"])
    is_whole, logged = run(lambda candidate, place: SimulatedRun([1.0, candidate.values["optimizer.lr"]]), lab)
    assert is_whole
    rows = lab.rows()
    assert [row.value for row in rows] == [row.values["optimizer.lr"] for row in rows]
    assert all(1e-4 <= row.values["optimizer.lr"] <= 1e-1 for row in rows)
    assert all(row.values["model_args.widths"] in ([64, 64], [8]) and row.values["n"] in (1, 2, 3) for row in rows)
    assert [(row.state, row.epochs, row.seconds) for row in rows] == [("done", 2, 1.0)] * 3
    assert [line.split("  ")[0] for line in logged] == ["trial 0", "trial 1", "trial 2"]


def test_a_trial_that_fails_is_marked_and_the_search_continues() -> None:
    ends = [
        TrialOutcome("failed", "rank 1 on node7 failed (training)\n  OutOfMemoryError: no memory"),
        TrialOutcome("done", history=[{"val_loss": math.nan}]),
        TrialOutcome("done", history=[{"train_loss": 1.0}]),
        TrialOutcome("done", history=[{"val_loss": 0.25}]),
    ]
    lab = study()
    is_whole, logged = run(lambda candidate, place: SimulatedRun([0.5], ends[candidate.number]), lab, total=4)
    assert is_whole
    assert states(lab) == ["failed", "failed", "failed", "done"]
    assert [row.reason for row in lab.rows()][1:3] == ["val_loss is nan", "val_loss was not measured"]
    assert "OutOfMemoryError: no memory" in logged[0]


def test_a_pruned_trial_is_asked_to_stop_once() -> None:
    lab = study(pruner=optuna.pruners.ThresholdPruner(upper=0.7))
    runs: list[SimulatedRun] = []

    def start(candidate: Candidate, place: int) -> SimulatedRun:
        runs.append(SimulatedRun([0.5, 0.9, 0.1, 0.1] if candidate.number == 1 else [0.5, 0.6]))
        return runs[-1]

    run(start, lab)
    assert states(lab) == ["done", "pruned", "done"]
    assert [each.stops for each in runs] == [0, 1, 0]
    assert lab.rows()[1].epochs == 2  # epochs after the decision are not reported


def test_a_trial_that_finishes_before_it_is_asked_to_stop_counts() -> None:
    lab = study(pruner=optuna.pruners.ThresholdPruner(upper=0.7))

    class Fast(SimulatedRun):
        def outcome(self) -> TrialOutcome | None:
            return self.end if self.reported == len(self.history) else None

    run(lambda candidate, place: Fast([0.9]), lab, total=1)
    assert [(row.state, row.value) for row in lab.rows()] == [("done", 0.9)]


def test_trials_side_by_side_have_different_places() -> None:
    lab, busy, most = study(), set(), []

    class Placed(SimulatedRun):
        def __init__(self, place: int) -> None:
            super().__init__([0.5, 0.5])
            assert place not in busy
            self.place = place
            busy.add(place)
            most.append(len(busy))

        def outcome(self) -> TrialOutcome | None:
            ended = super().outcome()
            if ended is not None:
                busy.discard(self.place)
            return ended

    run(lambda candidate, place: Placed(place), lab, total=7, parallel=3)
    assert len(lab.rows()) == 7
    assert max(most) == 3


def test_the_first_signal_stops_the_trials_and_the_next_search_resumes_them() -> None:
    def start(candidate: Candidate, place: int) -> SimulatedRun:
        if candidate.number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return SimulatedRun([0.5, 0.4], lasting=candidate.number > 0)

    before = signal.getsignal(signal.SIGINT)
    is_whole, logged = run(start, kept_study(), total=4, parallel=2)
    assert not is_whole
    assert signal.getsignal(signal.SIGINT) is before
    assert any("SIGINT" in line for line in logged)
    lab = kept_study(seed=1)
    assert states(lab) == ["done", "running", "running"]
    values = [row.values for row in lab.rows()]
    resumed: list[int] = []

    def resume(candidate: Candidate, place: int) -> SimulatedRun:
        resumed.append(candidate.number)
        return SimulatedRun([0.5, 0.4, 0.3])  # the first epochs are repeated

    assert run(resume, lab, total=4) == (True, [row.describe(GOAL) for row in lab.rows()[1:]])
    assert resumed == [1, 2, 3]  # 3 is new
    assert [row.values for row in lab.rows()][:3] == values
    assert [row.epochs for row in lab.rows()] == [2, 3, 3, 3]
    assert [row.seconds for row in lab.rows()] == [1.0, 2.0, 2.0, 1.0]
    assert len({str(row.values) for row in lab.rows()}) == 4  # the sampler does not repeat its values


def test_a_second_signal_ends_the_search() -> None:
    class Interrupting(SimulatedRun):
        def stop(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        def epochs(self) -> Iterator[dict[str, Any]]:
            os.kill(os.getpid(), signal.SIGTERM)
            yield from ()

    with pytest.raises(Interrupted, match="ended by SIGTERM; run the same command to resume the study"):
        run(lambda candidate, place: Interrupting(), kept_study())
    assert states(kept_study()) == ["running"]


def test_trials_of_another_folder_are_counted_and_not_resumed() -> None:
    theirs = kept_study(home="there")
    assert theirs.ask(3) is not None
    lab = kept_study()
    assert run(lambda candidate, place: SimulatedRun(), lab, total=3)[0]
    assert states(lab) == ["running", "done", "done"]


def test_equal_values_are_trained_once() -> None:
    lab, started = study(["batch_size={32}"]), []

    def start(candidate: Candidate, place: int) -> SimulatedRun:
        started.append(candidate.number)
        lab.start(candidate, "runs/first")
        return SimulatedRun([0.25])

    _, logged = run(start, lab, may_copy=True)
    assert started == [0]
    assert [(row.value, row.run_dir) for row in lab.rows()] == [(0.25, "runs/first")] * 3
    assert logged[-1].endswith("(the same as trial 0)")


def test_a_study_with_another_space_or_config_is_refused() -> None:
    kept_study().check_identity({"num_epochs": 5, "optimizer.lr": "log(0.0001, 0.1)"})
    kept_study().check_identity({"num_epochs": 5, "optimizer.lr": "log(0.0001, 0.1)"})
    with pytest.raises(ConfigError) as error:
        kept_study().check_identity({"num_epochs": 9, "optimizer.lr": "log(0.0001, 0.1)", "batch_size": 8})
    assert error.value.problems == [
        f"{key} but the study lab started with {then}; use that value, or start another study with --study NAME"
        for key, then in (("batch_size=8", "batch_size=None"), ("num_epochs=9", "num_epochs=5"))
    ]


def test_unknown_names_and_unusable_storages_are_refused() -> None:
    with pytest.raises(ConfigError, match="--sampler grid is not known; use tpe, random"):
        make_sampler("grid", 0)
    with pytest.raises(ConfigError, match="--pruner asha is not known; use median, hyperband, none"):
        make_pruner("asha", 3)
    with pytest.raises(ConfigError, match="--storage nowhere cannot be used"):
        Study("lab", "nowhere", parse([RANGE])[0], GOAL, home="here")
    for name in ("median", "hyperband", "none"):
        assert make_pruner(name, 10) is not None
    assert make_sampler("tpe", 0) is not None


def test_the_plots_are_one_page_that_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    lab = study([RANGE, "batch_size={32,64}"], sampler="tpe")
    run(lambda candidate, place: SimulatedRun([1.0, candidate.values["optimizer.lr"]]), lab, total=6)
    assert write_plots(tmp_path / "plots.html", lab.optuna, "val_loss") is None
    page = (tmp_path / "plots.html").read_text()
    assert "optimizer.lr" in page
    assert page.count('class="plotly-graph-div"') == 5
    assert 'src="http' not in page


def test_without_plotly_the_reason_is_returned(tmp_path: Path, hide_package: Callable[[str], None]) -> None:
    hide_package("plotly")
    assert "pip install 'paceline[tune]'" in (write_plots(tmp_path / "plots.html", study().optuna, "m") or "")
    assert not (tmp_path / "plots.html").exists()


def test_one_row_of_a_study_is_the_same_as_among_all_rows() -> None:
    lab = study()
    run(lambda candidate, place: SimulatedRun(), lab, total=2)
    assert [lab.row(0), lab.row(1)] == lab.rows()
