"""Several hosts with the same command on each: one hash, whatever happens to a rank, a host or a link."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab import PACELINE, Lab, is_rank, outcome, processes_with, rank_of, release, until

Process = subprocess.Popen[bytes]


def train(lab: Lab, host: str, *options: str, nodes: str = "2") -> Process:
    command = [PACELINE, "train", "config.yaml", "--nodes", nodes, "--rendezvous", "n1:29400", "--procs", "1"]
    return lab.on(host, *command, *options, log=Path(f"{host}.log"))


def output_of(host: str) -> str:
    return Path(f"{host}.log").read_text(errors="replace")


def held_run(lab: Lab, *hosts: str, nodes: str = "2") -> list[Process]:
    """Start a run on these hosts; it has saved a few checkpoints and waits in the middle of an epoch."""
    Path("hold").touch()
    started = [train(lab, host, nodes=nodes) for host in hosts]
    until(Path("held").exists)
    return started


def test_two_hosts_give_the_bits_of_one_process(lab: Lab, expected: dict[str, object]) -> None:
    with lab.slowed("n2", "100mbit"):
        agent = train(lab, "n2")
        until(lambda: "waiting for the coordinator at n1:29400" in output_of("n2"))
        coordinator = train(lab, "n1")
        assert (coordinator.wait(90), agent.wait(30)) == (0, 0)
    assert outcome(Path()) == expected
    assert "2 ranks on cpu" in output_of("n1")
    for host in ("n1", "n2"):  # each reports the end
        assert f"weights {str(expected['weights_sha256'])[:12]}" in output_of(host)
    assert oct(Path("run/.key").stat().st_mode)[-3:] == "600"
    assert not Path("run/job.bin").exists()


def test_a_killed_rank_costs_a_restart_on_all_hosts(lab: Lab, expected: dict[str, object]) -> None:
    coordinator, agent = held_run(lab, "n1", "n2")
    os.kill(rank_of(1), signal.SIGKILL)
    release()
    assert (coordinator.wait(90), agent.wait(30)) == (0, 0)
    assert outcome(Path()) == expected
    assert "rank 1 failed" in output_of("n1")
    assert "restart 1 of 3" in output_of("n1")


def test_the_other_hosts_take_over_from_a_host_that_is_lost(lab: Lab, expected: dict[str, object]) -> None:
    coordinator, agent = held_run(lab, "n1", "n2", nodes="1:2")
    agent.kill()
    until(lambda: "host n2 has left" in output_of("n1"))
    release()
    assert coordinator.wait(90) == 0
    assert outcome(Path()) == expected
    assert "HostLost" in output_of("n1")


@pytest.mark.long
def test_a_fixed_number_of_hosts_is_waited_for(lab: Lab, expected: dict[str, object]) -> None:
    coordinator, agent = held_run(lab, "n1", "n2")
    agent.kill()
    release()
    until(lambda: "waiting for hosts at n1:29400: 1 of 2 (n1)" in output_of("n1").partition("host n2 has left")[2])
    coordinator.send_signal(signal.SIGUSR1)  # nothing runs, so nothing is lost
    assert coordinator.wait(30) == 3
    assert "stopped by SIGUSR1 while no rank was running" in output_of("n1")
    again = [train(lab, host, "--resume", "auto") for host in ("n1", "n2")]
    assert [process.wait(90) for process in again] == [0, 0]
    assert outcome(Path()) == expected


def test_a_host_that_joins_late_gets_ranks(lab: Lab, expected: dict[str, object]) -> None:
    (coordinator,) = held_run(lab, "n1", nodes="1:2")
    agent = train(lab, "n2", nodes="1:2")
    until(lambda: "host n2 has joined" in output_of("n1"))
    release()
    assert (coordinator.wait(90), agent.wait(30)) == (0, 0)
    assert outcome(Path()) == expected
    assert "capacity for more ranks is available" in output_of("n1")
    assert "2 ranks on cpu" in output_of("n1")


@pytest.mark.long
def test_a_link_that_is_cut_is_noticed_and_its_host_joins_again(lab: Lab, expected: dict[str, object]) -> None:
    coordinator, agent = held_run(lab, "n1", "n2", nodes="1:2")
    with lab.cut("n2"):
        until(lambda: "host n2 has left" in output_of("n1"))
        until(lambda: "no longer responds" in output_of("n2"))
        assert not [pid for pid in processes_with(str(Path.cwd())) if is_rank(pid, 1)]
    release()
    assert coordinator.wait(90) == 0
    assert outcome(Path()) == expected
    until(lambda: agent.poll() is not None or "joined n1" in output_of("n2").partition("no longer responds")[2])


def test_a_signal_to_any_host_saves_and_stops_the_run(lab: Lab, expected: dict[str, object]) -> None:
    coordinator, agent = held_run(lab, "n1", "n2")
    agent.send_signal(signal.SIGTERM)
    release()
    assert (coordinator.wait(60), agent.wait(30)) == (3, 3)
    assert "checkpoint saved" in output_of("n2")
    again = [train(lab, host, "--resume", "auto") for host in ("n2", "n1")]
    assert [process.wait(90) for process in again] == [0, 0]
    assert outcome(Path()) == expected


@pytest.mark.long
def test_a_coordinator_that_is_killed_leaves_no_process_and_the_run_is_resumed_later(
    lab: Lab, expected: dict[str, object]
) -> None:
    coordinator, agent = held_run(lab, "n1", "n2")
    coordinator.kill()
    until(lambda: "no longer responds" in output_of("n2"))
    until(lambda: not [pid for pid in processes_with(str(Path.cwd())) if is_rank(pid, 0) or is_rank(pid, 1)])
    release()
    coordinator = train(lab, "n1", "--resume", "auto")  # the agent still tries to reach it
    assert (coordinator.wait(90), agent.wait(30)) == (0, 0)
    assert outcome(Path()) == expected


def test_a_hang_costs_a_restart_and_leaves_a_table_of_all_ranks_and_their_hosts(
    lab: Lab, expected: dict[str, object]
) -> None:
    Path("hold").touch()
    coordinator, agent = (train(lab, host, "hang_timeout_s=4") for host in ("n1", "n2"))
    assert (coordinator.wait(90), agent.wait(30)) == (0, 0)
    assert outcome(Path()) == expected
    # Which of them waits for the other depends on which has the sample.
    assert re.search(
        r"hang: rank \d is in `work\.py:\d+`; rank \d waits for it in .* \(restart 1 of 3\)", output_of("n1")
    )
    table = Path("run/logs/hang-1.txt").read_text()
    assert "no rank has made progress for" in table
    assert re.search(r"^  0 +n1 ", table, re.M)
    assert re.search(r"^  1 +n2 ", table, re.M)


def test_a_coordinator_that_waits_for_its_first_agent_can_be_stopped(lab: Lab) -> None:
    coordinator = train(lab, "n1")
    until(lambda: "waiting for hosts" in output_of("n1"))
    coordinator.send_signal(signal.SIGUSR1)
    assert coordinator.wait(30) == 3
    assert "stopped by SIGUSR1 before it started" in output_of("n1")


@pytest.mark.long
def test_a_port_that_another_program_uses_is_reported(lab: Lab) -> None:
    listens = 'import socket; door = socket.create_server(("n1", 29400)); print("listening", flush=True); input()'
    other = lab.on("n1", "sh", "-c", f"sleep 60 | {sys.executable} -c '{listens}'", log=Path("other.log"))
    until(lambda: "listening" in Path("other.log").read_text())
    agent = train(lab, "n2")
    assert agent.wait(60) == 2
    assert "n1:29400 is used by another program; choose another port" in output_of("n2")
    os.killpg(other.pid, signal.SIGKILL)


def test_a_host_without_the_key_is_not_admitted_and_delays_no_other(lab: Lab) -> None:
    coordinator = train(lab, "n1")
    until(lambda: "waiting for hosts at n1:29400: 1 of 2 (n1)" in output_of("n1"))
    Path("elsewhere").mkdir()
    for name in ("work.py", "config.yaml"):
        Path("elsewhere", name).write_text(Path(name).read_text())
    silent = lab.on("n3", "sh", "-c", "sleep 60 | nc n1 29400 || exec sleep 60", log=Path("n3.log"))
    outsider = lab.on(
        "n2", "sh", "-c", f"cd elsewhere; exec {PACELINE} train config.yaml --nodes 2 --rendezvous n1:29400",
        log=Path("outsider.log"),
    )  # fmt: skip
    assert outsider.wait(60) == 2
    assert "all hosts need the same shared folder" in Path("outsider.log").read_text()
    agent = train(lab, "n2")
    assert (coordinator.wait(90), agent.wait(30)) == (0, 0)
    os.killpg(silent.pid, signal.SIGKILL)


@pytest.mark.long
def test_torchrun_on_each_host_does_the_same(lab: Lab, expected: dict[str, object]) -> None:
    Path("hold").touch()
    words = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500"]
    command = [PACELINE.parent / "torchrun", *words, "-m", "paceline", "train", "config.yaml"]
    started = [
        lab.on(host, "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *command, log=Path(f"{host}.log"))
        for host in ("n1", "n2")
    ]
    until(Path("held").exists)
    os.kill(_child_of(started[1].pid), signal.SIGKILL)
    release()
    assert [process.wait(120) for process in started] == [0, 0]
    assert outcome(Path()) == expected
    assert "resuming from step" in output_of("n1") + output_of("n2")


def _child_of(parent: int) -> int:
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])


@pytest.mark.long
def test_a_run_of_several_hosts_is_evaluated_on_one(lab: Lab, expected: dict[str, object]) -> None:
    coordinator, agent = train(lab, "n1"), train(lab, "n2")
    assert (coordinator.wait(90), agent.wait(30)) == (0, 0)
    printed = subprocess.run([PACELINE, "evaluate", "run"], capture_output=True, text=True, check=True).stdout
    assert "accuracy" in printed
