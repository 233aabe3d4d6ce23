"""A run on several hosts: the same command on each, one of which is the head."""

from __future__ import annotations

from paceline.config import Config
from paceline.errors import PacelineError
from paceline.launch import local, network
from paceline.launch.cluster import agent, coordinator
from paceline.launch.cluster.key import key_of
from paceline.observe.screen.console import Screen
from paceline.run.job import Task
from paceline.run.outcome import Outcome


def start(config: Config, task: Task) -> Outcome:
    """Do the task together with the other hosts, and return the outcome on each of them."""
    assert config.rendezvous is not None
    say = Screen().note
    door = network.listen(*coordinator.address_in(config.rendezvous))
    if door is None:
        return agent.serve(config, say)
    site = coordinator.Hosts(config, door, key_of(config), say)
    try:
        outcome = local.start(config, task, site)
    except PacelineError as error:
        site.part(None, str(error), error.exit_code)
        raise
    except BaseException as error:
        site.part(None, f"the head was ended by {type(error).__name__}")
        raise
    site.part(outcome.run_dir)
    return outcome
