"""Hosts on one machine: network namespaces with links of their own, which can be slowed and cut; and Slurm over them.

It needs root, and Debian's packages iproute2, slurm-wlm and munge. The hosts share files and pids. Everything is ended
by pid.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACELINE = Path(sys.executable).parent / "paceline"
TOOLS = ("ip", "tc", "nsenter", "unshare", "mount")


def obstacle() -> str | None:
    """Why such hosts cannot be created here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} is not installed (iproute2, util-linux)" if missing else None


class Lab:
    """A bridge and its hosts n1, n2 and so on, at 10.NET.0.1, 10.NET.0.2 …"""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.tag, self.net = f"pl{os.getpid() % 100_000}", 64 + os.getpid() % 128
        self.bridge = f"{self.tag}b"
        self.names = [f"n{number}" for number in range(1, hosts + 1)]
        self.started: list[subprocess.Popen[bytes]] = []
        self.table = folder / "hosts"
        self.table.write_text(
            "127.0.0.1 localhost\n" + "".join(f"10.{self.net}.0.{n} n{n}\n" for n in range(1, hosts + 1))
        )

    def up(self) -> None:
        """Create the bridge and the hosts."""
        _do(f"ip link add {self.bridge} type bridge")
        _do(f"ip addr add 10.{self.net}.0.254/24 dev {self.bridge}")
        _do(f"ip link set {self.bridge} up")
        for number, name in enumerate(self.names, start=1):
            space = self._space(name)
            _do(f"ip netns add {space}")
            _do(f"ip link add {self._link(name)} type veth peer name eth0 netns {space}")
            _do(f"ip link set {self._link(name)} master {self.bridge} up")
            _do(f"ip -n {space} addr add 10.{self.net}.0.{number}/24 dev eth0")
            _do(f"ip -n {space} link set eth0 up")
            _do(f"ip -n {space} link set lo up")

    def down(self) -> None:
        """End all processes, and remove the hosts."""
        self.end_all()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def end_all(self) -> None:
        """End every process that was started here."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.started.clear()

    def on(
        self, host: str, *command: str | Path, log: Path, name: str | None = None, table: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, or in a pod on it with a name and a table of names; its output goes to a file."""
        # Not `ip netns exec`, which remounts /sys.
        script = f'hostname {name or host}; mount --bind {table or self.table} /etc/hosts; exec "$@"'
        place = ["nsenter", f"--net=/run/netns/{self._space(host)}", "unshare", "--uts", "--mount", "sh", "-c", script]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*place, "sh", *map(str, command)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    @contextmanager
    def cut(self, host: str) -> Iterator[None]:
        """Cut a host's link inside."""
        _do(f"ip link set {self._link(host)} down")
        try:
            yield
        finally:
            _do(f"ip link set {self._link(host)} up")

    @contextmanager
    def slowed(self, host: str, rate: str) -> Iterator[None]:
        """Limit a host's link to this rate inside."""
        _do(f"tc -n {self._space(host)} qdisc replace dev eth0 root tbf rate {rate} burst 128k latency 200ms")
        try:
            yield
        finally:
            _do(f"tc -n {self._space(host)} qdisc del dev eth0 root")

    def address_of(self, host: str) -> str:
        """The address of a host."""
        return f"10.{self.net}.0.{host[1:]}"

    def _space(self, host: str) -> str:
        return f"{self.tag}_{host}"

    def _link(self, host: str) -> str:
        return f"{self.tag}v{host[1:]}"


SLURM_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
SLURM_CONF = """\
ClusterName={tag}
SlurmctldHost={host}({address}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={daemon_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
KillWait=10
MinJobAge=3600
SlurmdTimeout=10
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4 PriorityTier=1 GraceTime=15
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A real Slurm whose nodes are the hosts of a lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder, self.conf = lab, folder, folder / "slurm.conf"
        self.socket = folder / "munge" / "munge.sock"

    def up(self) -> None:
        """Start it, and wait until its nodes are idle."""
        for name in ("munge", "state", *(f"spool.{host}" for host in self.lab.names)):
            (self.folder / name).mkdir()
        self.folder.chmod(0o711)
        (self.folder / "munge").chmod(0o755)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        address = f"10.{self.lab.net}.0"
        nodes = [
            f"NodeName={name} NodeAddr={address}.{number} CPUs=4 RealMemory=8000 State=UNKNOWN"
            for number, name in enumerate(self.lab.names, start=1)
        ]
        port = 17_000 + 2 * (os.getpid() % 1000)
        self.conf.write_text(
            SLURM_CONF.format(
                tag=self.lab.tag, host=socket.gethostname().partition(".")[0], address=address, folder=self.folder,
                port=port, daemon_port=port + 1, nodes="\n".join(nodes),
            )
        )  # fmt: skip
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        munge = {
            "key-file": "key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "log", "seed-file": "seed",
        }  # fmt: skip
        _do("munged --force " + " ".join(f"--{name}={self.folder}/munge/{file}" for name, file in munge.items()))
        _do(f"slurmctld -f {self.conf} -c")
        for host in self.lab.names:
            self.lab.on(host, "slurmd", "-f", self.conf, "-N", host, log=self.folder / f"{host}.out")
        until(
            lambda: self.ask("sinfo", "--noheader", "--partition=debug", "--format=%t %D") == f"idle {len(nodes)}", 30
        )

    def down(self) -> None:
        """End its daemons."""
        files = [self.folder / f"slurmd.{host}.pid" for host in self.lab.names]
        for file in (*files, self.folder / "slurmctld.pid", self.folder / "munge" / "munged.pid"):
            with suppress(OSError, ValueError):
                pid = int(file.read_text())
                os.kill(pid, signal.SIGTERM)
                with suppress(TimeoutError):
                    until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 5)  # type: ignore[misc]

    def ask(self, *command: str) -> str:
        """The output of a command of Slurm."""
        variables = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(command, env=variables, check=False, capture_output=True, text=True).stdout.strip()


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def until(condition: Callable[[], object], timeout_s: float = 90) -> None:
    """Wait for a condition; TimeoutError if it does not become true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not become true")
        time.sleep(0.05)


def processes_with(text: str) -> list[int]:
    """The pids of processes whose command line or working folder has this text in it, on any host of the lab."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                if text in words or text in str((entry / "cwd").readlink()):
                    found.append(int(entry.name))
    return found


def outcome(folder: Path) -> dict[str, object]:
    """The results that must be equal for every way to run the work."""
    result = json.loads((folder / "run" / "result.json").read_text())
    return {key: result[key] for key in ("weights_sha256", "ema_sha256", "optimizer_sha256", "history")}


def release() -> None:
    """Let a run continue that is held (work.py)."""
    Path("hold").unlink()


def rank_of(number: int) -> int:
    """The pid of a rank that works in this folder, on any host."""
    return next(pid for pid in processes_with(str(Path.cwd())) if is_rank(pid, number))


def is_rank(pid: int, number: int) -> bool:
    """Whether a process is this rank of a run."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == f"paceline-rank-{number}"[:15]
    except OSError:
        return False
