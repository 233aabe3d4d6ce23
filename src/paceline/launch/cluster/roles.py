"""A run on several hosts: the same command on each, one of which becomes the coordinator."""

from __future__ import annotations

from paceline.config import Config
from paceline.errors import PacelineError
from paceline.launch import kubernetes, local, network
from paceline.launch.cluster import agent
from paceline.launch.cluster.coordinator import GATHER_S, Coordinator
from paceline.launch.cluster.key import key_of
from paceline.observe.screen.console import Screen
from paceline.run.job import Task
from paceline.run.outcome import Outcome


def start(config: Config, task: Task) -> Outcome:
    """Run the task together with the other hosts, and return the outcome on each of them."""
    assert config.rendezvous is not None
    log = Screen().note
    index = kubernetes.index()
    if index is None:
        listening = network.listen(*network.address_in(config.rendezvous))
    else:
        listening = kubernetes.listen(config.rendezvous, GATHER_S, log) if index == 0 else None
    if listening is None:
        return agent.serve(config, log)
    coordinator = Coordinator(config, listening, key_of(config), log)
    try:
        outcome = local.start_on(coordinator, config, task)
    except PacelineError as error:
        coordinator.finish(None, str(error), error.exit_code)
        raise
    except BaseException as error:
        coordinator.finish(None, f"the coordinator failed with {type(error).__name__}")
        raise
    coordinator.finish(outcome.run_dir)
    return outcome
