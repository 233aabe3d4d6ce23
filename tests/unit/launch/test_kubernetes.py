"""A host that is a pod: which one is the coordinator, and which errors another pod may cure.

Runs of several pods are in tests/cluster.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Config, build
from paceline.errors import ConfigError, RankFailed, Stopped
from paceline.launch import kubernetes, network
from paceline.launch.cluster import agent, coordinator
from paceline.launch.cluster.agent import join
from paceline.launch.cluster.coordinator import Coordinator
from paceline.launch.cluster.transport import HandshakeFailed, KeysDiffer
from paceline.run.layout import RunFolder
from paceline.run.lock import locked

KEYS = {"train_fn": print, "model_fn": print, "dataset_fn": print, "nodes": 2, "rendezvous": "lab-0.lab:29400"}


@pytest.fixture
def _pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return build({**KEYS, "run_dir": tmp_path / "run", "resume": "auto"})


def test_the_index_of_a_pod_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    assert kubernetes.index() is None
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "12")
    assert kubernetes.index() == 12
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "first")
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX=first is not a number; leave it to Kubernetes"):
        kubernetes.index()


@pytest.mark.usefixtures("_pod")
def test_the_first_pod_waits_until_the_name_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> Iterator[socket.socket | None]:
        yield None  # not known
        yield None  # the address of the pod before it
        yield socket.create_server(("127.0.0.1", 0))

    found, lines = answers(), list[str]()
    monkeypatch.setattr(network, "listen", lambda host, port: next(found))
    monkeypatch.setattr(kubernetes, "RETRY_S", 0)
    with kubernetes.listen("lab-0.lab:29400", 60, lines.append):
        pass
    assert lines == ["waiting until lab-0.lab:29400 is an address of this pod"]

    monkeypatch.undo()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    with pytest.raises(Stopped, match=r"after 0 s no-such\.invalid:1 is no address of this pod \(index 0\); Kube"):
        kubernetes.listen("no-such.invalid:1", 0, print)


@pytest.mark.parametrize(
    ("error", "outside"),
    [
        (network.UnknownHost("rendezvous=lab-0.lab is not known here"), ConfigError),
        (KeysDiffer("the keys differ"), ConfigError),  # another run may have the old address of the coordinator
        (HandshakeFailed("it uses another protocol"), ConfigError),
        (ConnectionRefusedError("refused"), RankFailed),
    ],
)
def test_a_pod_that_finds_no_coordinator_is_started_again(
    monkeypatch: pytest.MonkeyPatch, config: Config, error: Exception, outside: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(agent, "connect", fail)
    monkeypatch.setattr(agent, "RETRY_S", 0)
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    with pytest.raises(outside):
        join(config, "lab-0.lab:29400", 0.05, print)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(Stopped, match=r"no coordinator responded at lab-0\.lab:29400 for \d+ s") as caught:
        join(config, "lab-0.lab:29400", 0.05, print)
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("_pod")
def test_a_coordinator_whose_pods_do_not_come_is_started_again(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    monkeypatch.setattr(coordinator, "GATHER_S", 0)
    waiting = Coordinator(config, socket.create_server(("127.0.0.1", 0)), b"key", print)
    with pytest.raises(Stopped, match=r"nodes=2 but only .* joined within 0 s; Kubernetes replaces this pod"):
        waiting.gather()
    waiting.finish(None)


@pytest.mark.parametrize(("is_pod", "error"), [(False, ConfigError), (True, Stopped)])
def test_a_run_that_a_lost_pod_still_locks_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_pod: bool, error: type[Exception]
) -> None:
    from paceline.launch import local
    from paceline.run import lock

    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    if is_pod:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setattr(lock, "TIMEOUT_S", 0)
    alone = build({**KEYS, "nodes": None, "rendezvous": None, "run_dir": tmp_path})
    with locked(RunFolder(tmp_path)), pytest.raises(error, match="is being trained by another process"):  # noqa: SIM117
        with local._opened(alone, tmp_path):
            pass


def test_a_run_that_has_finished_is_not_started_by_a_late_pod(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    assert config.run_dir is not None
    folder = RunFolder(config.run_dir)
    folder.path.mkdir()
    folder.config.write_text(config.to_yaml())
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert kubernetes.finished(config) is None
    folder.result.write_text('{"step": 3, "metrics": {}, "weights_sha256": "0123", "ema_sha256": null}')
    outcome = kubernetes.finished(config)
    assert outcome is not None
    assert (outcome.run_dir, outcome.stopped) == (folder.path.resolve(), None)
    assert kubernetes.finished(config.model_copy(update={"num_epochs": 9})) is None  # it is trained for longer
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    assert kubernetes.finished(config) is None
