"""How well `paceline plan` predicts the time of a step: measured runs on hosts with slow links, against the model.

    sudo python benchmarks/plan.py                    # hosts in network namespaces; needs gcc, iproute2 and root
    python benchmarks/plan.py --local 1,2,4,8         # ranks of this host, on its cores
    python benchmarks/plan.py --local 1,2,4 --device cuda      # NCCL ranks, which may share a GPU

Each host has one rank, or two. What it sends passes a token bucket (`tc … tbf`), and is delivered after a delay by
`plan_links/delay.c`. The ranks share the cores of this machine, so the parts of a step are measured with as many ranks
at work, as `paceline plan` does for those of a host. The prediction is for the speed and latency that the links have
while all hosts send (`plan_links/ring.py`), which the cores limit, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "cluster"), str(HERE / "plan_links")]

from lab import PACELINE, Lab  # noqa: E402
from shaping import set_link  # noqa: E402

from paceline.config import read_yaml  # noqa: E402
from paceline.tools.plan.forecast import Terms, forecast  # noqa: E402
from paceline.tools.plan.links import NAMED, Link  # noqa: E402
from paceline.tools.plan.measure import measure  # noqa: E402
from paceline.trainer import build_config  # noqa: E402
from paceline.world import NCCL_ON_SHARED_GPU  # noqa: E402

RATES = {"10mbit": 10e6 / 8, "100mbit": 100e6 / 8, "1000mbit": 1000e6 / 8}
DELAYS_US = (100, 5_000, 20_000)
SETTLING = {"none": 10, "10mbit": 4, "100mbit": 6, "1000mbit": 10}  # steps in which the windows of TCP grow
# Windows that grow until a burst fits, and do not shrink between two steps: those of a run after its first minutes.
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}
MTU = 9_000
PINGS, SENT_S = 20, 3.0  # of the measurement of a link
STEPS = 20

COMMON: dict[str, Any] = {
    "name": "plan", "loss_fn": "torch.nn.functional:cross_entropy", "optimizer": {"name": "sgd", "lr": 0.01},
    "val_fraction": 0, "threads": 1, "device": "cpu", "max_steps": 10_000, "num_epochs": 1_000, "lanes": 4,
    "checkpoint": {"every_minutes": None}, "log": {"tensorboard": False, "every_steps": 1_000},
}  # fmt: skip


def _mlp(width: int, layers: int, batch_size: int) -> dict[str, Any]:
    return {
        "model_fn": "sweep:mlp", "model_args": {"width": width, "layers": layers},
        "dataset_fn": "sweep:vectors", "dataset_args": {"width": width}, "batch_size": batch_size,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "MLP, 0.2 M": _mlp(256, 3, 64),
    "MLP, 2 M, buckets of 1 MB": {**_mlp(640, 5, 64), "bucket_mb": 1},
    "MLP, 2 M, exact: false": {**_mlp(640, 5, 64), "exact": False},
    "convolutions, 0.04 M": {"model_fn": "sweep:convolutions", "dataset_fn": "sweep:images", "batch_size": 32},
}


class Case(NamedTuple):
    """A model on some hosts, and the rates of their links."""

    model: str
    hosts: int
    per_host: int
    rates: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.per_host


CASES = [
    Case("MLP, 0.2 M", 2, 1, ("10mbit", "100mbit", "1000mbit")),
    Case("MLP, 0.2 M", 3, 1, ("100mbit",)),
    Case("MLP, 0.2 M", 4, 1, ("10mbit", "100mbit", "1000mbit")),
    Case("MLP, 0.2 M", 2, 2, ("10mbit", "100mbit", "1000mbit")),
    Case("MLP, 2 M, buckets of 1 MB", 2, 1, ("100mbit", "1000mbit")),
    Case("MLP, 2 M, buckets of 1 MB", 4, 1, ("100mbit", "1000mbit")),
    Case("MLP, 2 M, exact: false", 2, 1, ("100mbit", "1000mbit")),
    Case("convolutions, 0.04 M", 2, 1, ("10mbit", "100mbit", "1000mbit")),
    Case("convolutions, 0.04 M", 4, 1, ("10mbit", "100mbit", "1000mbit")),
]


class DelayedLab(Lab):
    """Hosts whose packets pass `delay.c` instead of a bridge."""

    def __init__(self, folder: Path, hosts: int) -> None:
        super().__init__(folder, hosts)
        self.program, self.delay = folder / "delay", folder / "delay.bin"
        subprocess.run(["cc", "-O2", "-o", self.program, HERE / "plan_links" / "delay.c"], check=True)
        self.delay.write_bytes(bytes(4))

    def up(self) -> None:
        """Create the hosts and the process that connects them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "add", self._space(name)], check=True)
        ends = [f"{self._space(name)}={self.address_of(name)}" for name in self.names]
        self.relay = subprocess.Popen([self.program, self.delay, *ends], stdout=subprocess.PIPE)
        assert self.relay.stdout is not None
        self.relay.stdout.readline()
        for name in self.names:
            for words in (
                f"ip link set eth0 mtu {MTU}", f"ip addr add {self.address_of(name)}/24 dev eth0",
                "ip link set eth0 up", "ip link set lo up", *(f"sysctl -qw net.ipv4.{k}={v}" for k, v in TCP.items()),
            ):  # fmt: skip
                subprocess.run(["nsenter", f"--net=/run/netns/{self._space(name)}", *words.split()], check=True)

    def down(self) -> None:
        """End all processes, and remove the hosts."""
        self.end_all()
        self.relay.kill()
        self.relay.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False)

    @property
    def spaces(self) -> list[str]:
        """The names of the network namespaces."""
        return [self._space(name) for name in self.names]


def main() -> None:
    """Run the cases and print a row for each, in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", help="ranks of this host, such as 1,2,4,8, instead of hosts with slow links")
    parser.add_argument("--cases", help="the numbers of some cases, such as 0,3")
    parser.add_argument("--out", type=Path, help="append the figures to a JSON lines file")
    parser.add_argument("--device", default="cpu", help="with --local: cpu or cuda")
    options = parser.parse_args()
    if options.device == "cuda":
        os.environ[NCCL_ON_SHARED_GPU] = "1"
    chosen = [int(number) for number in (options.cases or ",".join(map(str, range(len(CASES))))).split(",")]
    print("predicted / measured milliseconds of a step\n")
    print("| model | hosts × ranks | link | 0.1 ms | 5 ms | 20 ms |\n|---|---|---|---|---|---|")
    cases = [CASES[number] for number in chosen]
    if options.local:
        counts = map(int, options.local.split(","))
        cases = [Case(model, 1, ranks, ("none",)) for ranks in counts for model in MODELS]
    rows: list[dict[str, Any]] = []
    for case in cases:
        found = show(in_process(case, options.device))
        rows += found
        if options.out:
            with options.out.open("a") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in found)
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    print(f"\nmedian error {median(errors):.1%}, worst {errors[-1]:.1%}, {len(errors)} cases")


def show(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print a line of the table for each rate, with a cell for each latency."""
    for rate in dict.fromkeys(row["rate"] for row in rows):
        line = [row for row in rows if row["rate"] == rate]
        cells = [
            f"{_ms(row['predicted'])} / {_ms(row['measured'])}, {row['predicted'] / row['measured'] - 1:+.0%}"
            for row in line
        ]
        place = f"{line[0]['hosts']} × {line[0]['per_host']}"
        print(f"| {line[0]['model']} | {place} | {rate} | {' | '.join(cells)} |", flush=True)
    return rows


def _ms(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def in_process(case: Case, device: str) -> list[dict[str, Any]]:
    """The rows of a case, from a process of its own: each imports another copy of the model's file."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_case, case, device).result()


def run_case(case: Case, device: str = "cpu") -> list[dict[str, Any]]:
    """Measure a case, and predict it from parts that are measured on this machine."""
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as name:
        folder = Path(name)
        for part in ("sweep.py", "shaping.py"):
            shutil.copy(HERE / "plan_links" / part, folder)
        keys = {**COMMON, **MODELS[case.model], "device": device}
        (folder / "config.yaml").write_text(json.dumps(keys))  # YAML contains JSON
        config = build_config(read_yaml(folder / "config.yaml"), folder, ())
        measured, run_keys = measure(config, case.ranks, STEPS, folder / "runs", folder)
        links = [(rate, delay) for rate in case.rates for delay in (DELAYS_US if case.hosts > 1 else (0,))]
        times, found_links = time_steps(case, folder, keys, links)
    rows = []
    for (rate, delay), seconds, link in zip(links, times, found_links, strict=True):
        found = forecast(measured, run_keys, Terms(link, case.per_host), case.ranks)
        rows.append(
            {
                "model": case.model, "hosts": case.hosts, "per_host": case.per_host, "rate": rate, "delay_us": delay,
                "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s, "limit": found.limit,
                "predicted": found.step_ms, "measured": 1e3 * seconds,
                "parts": asdict(measured), "keys": asdict(run_keys),
            }
        )  # fmt: skip
    return rows


def time_steps(
    case: Case, folder: Path, keys: dict[str, Any], links: list[tuple[str, int]]
) -> tuple[list[float], list[Link]]:
    """The seconds of a step with each link, from a run of `paceline train` on the hosts; and the links as measured."""
    (folder / "config.yaml").write_text(json.dumps({**keys, "run_dir": "run", "callbacks": ["sweep:Sweep"]}))
    settled = [(rate, delay, SETTLING[rate]) for rate, delay in links]
    sweep: dict[str, Any] = {"links": settled, "spaces": [], "delay": ""}
    command = [PACELINE, "train", "config.yaml", "--procs", str(case.per_host)]
    found = [NAMED["pcie"]] * len(links)
    if case.hosts == 1:
        (folder / "sweep.json").write_text(json.dumps(sweep))
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    else:
        lab = DelayedLab(folder, case.hosts)
        sweep = {**sweep, "spaces": lab.spaces, "delay": str(lab.delay)}
        (folder / "sweep.json").write_text(json.dumps(sweep))
        try:
            lab.up()
            found = links_of(lab, folder, links)
            nodes = ["--nodes", str(case.hosts), "--rendezvous", "n1:29400"]
            script = f'cd {folder}; exec "$@"'
            started = [
                lab.on(host, "sh", "-c", script, "sh", *command, *nodes, log=folder / f"{host}.log")
                for host in lab.names
            ]
            for process in started:
                process.wait(600)
        finally:
            lab.down()
    if not (folder / "times.json").exists():
        raise RuntimeError("\n".join(log.read_text() for log in folder.glob("n*.log")))
    return list(json.loads((folder / "times.json").read_text())), found


def links_of(lab: DelayedLab, folder: Path, links: list[tuple[str, int]]) -> list[Link]:
    """The latency of each of these links, and the speed of its rate while all hosts send.

    The speed is that with the shortest delay: with a longer one, the window of TCP would grow first.
    """
    speeds, found = {}, []
    for rate, delay_us in links:
        if rate not in speeds:
            set_link(lab.spaces, str(lab.delay), rate, DELAYS_US[0])
            speeds[rate], _ = _ring(lab, folder, int(RATES[rate] * SENT_S), 1)
        set_link(lab.spaces, str(lab.delay), rate, delay_us)
        _, latency = _ring(lab, folder, 1, PINGS)
        found.append(Link(speeds[rate], latency))
    return found


def _ring(lab: DelayedLab, folder: Path, size: int, pings: int) -> list[float]:
    """The median of what the hosts measure at the same time."""
    addresses = [lab.address_of(name) for name in lab.names]
    logs = [folder / f"ring-{name}.json" for name in lab.names]
    pairs = zip(addresses, [*addresses[1:], addresses[0]], strict=True)
    started = [
        lab.on(name, sys.executable, HERE / "plan_links" / "ring.py", *pair, str(size), str(pings), log=log)
        for name, pair, log in zip(lab.names, pairs, logs, strict=True)
    ]
    for process in started:
        process.wait(120)
    return [median(column) for column in zip(*(json.loads(log.read_text()) for log in logs), strict=True)]


if __name__ == "__main__":
    main()
