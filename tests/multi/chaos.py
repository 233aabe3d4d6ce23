"""A run that is hit again and again and must end with the hash of the undisturbed one.

    python tests/multi/chaos.py --hits 20 --seed 1

Each hit is one of: SIGKILL to a rank, to the process that ranks are forked from or to the launcher, SIGTERM, a newest
checkpoint cut short, a full disk, a rank suspended for less or for more than `hang_timeout_s`, the run folder deleted.
After it, before the next attempt, the run folder is renamed or one of its small files is damaged.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from paceline.observe.events import read

HANG_TIMEOUT_S = 10
RUN = """
import sys, time
import torch
from torch import nn
from paceline import Trainer
from paceline.errors import PacelineError, Stopped

class Slow(torch.utils.data.Dataset):
    def __init__(self, size=360):
        self.x = torch.randn(size, 1, 6, 6, generator=torch.Generator().manual_seed(7))
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        time.sleep(0.001)
        return self.x[i] + 0.1 * torch.randn(1, 6, 6), (self.x[i].mean() > 0).long()

def model():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
                         nn.Linear(288, 2))

trainer = Trainer(
    model, Slow, loss_fn=nn.functional.cross_entropy, metrics=["accuracy"], batch_size=3, lanes=4,
    num_epochs=int(sys.argv[4]),
    optimizer={"name": "adamw", "lr": 3e-3}, schedule={"name": "cosine", "warmup_steps": 5}, ema=0.9, threads=1,
    checkpoint={"every_steps": 5, "keep": 3}, clip_norm=1.0, workers=int(sys.argv[3]), max_restarts=3,
    run_dir=sys.argv[1], procs=int(sys.argv[2]), resume="auto", device="cpu", hang_timeout_s=float(sys.argv[5]),
)
try:
    trainer.start()
except Stopped:
    raise
except PacelineError as error:
    sys.exit(f"error: {error}")
"""
SAME = ("weights_sha256", "ema_sha256", "optimizer_sha256", "history", "metrics", "step", "samples")
RECORDED = ("step", "steps", "epoch", "epochs", "loss", "lr", "grad_norm")  # all of a `step` event but its time


class Disk:
    """A small disk for the run folder, which can be filled; without the right to mount one, files are limited."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)]
        self.is_own = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    @contextmanager
    def full(self, ranks: list[psutil.Process]) -> Iterator[None]:
        if not self.is_own:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
            yield
            for rank in ranks:
                with suppress(ProcessLookupError):
                    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            return
        ballast = self.path / "ballast"
        with ballast.open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
        yield
        ballast.unlink()

    def close(self) -> None:
        if self.is_own:
            subprocess.run(["umount", "-l", str(self.path)], check=False)


class Chaos:
    """The run, and what is done to it."""

    def __init__(self, folder: Path, seed: int, epochs: int) -> None:
        self.random, self.epochs = random.Random(seed), epochs
        self.script = folder / "run.py"
        self.script.write_text(RUN)
        self.disk = Disk(folder / "disk")
        self.run_dir = self.disk.path / "run"
        self.deeds = [
            self.kill_rank, self.kill_fork_server, self.kill_launcher, self.terminate, self.cut_checkpoint,
            self.fill_disk, self.pause_rank, self.hang_rank, self.delete_folder,
        ]  # fmt: skip
        self.breaks = [self.damage_file, self.rename_folder]  # between two attempts
        self.has_all_events = True
        self.output = folder / "output.txt"
        self.log = self.output.open("w")
        self.undisturbed = folder / "undisturbed"

    def start(self, run_dir: Path) -> subprocess.Popen[str]:
        procs, workers = self.random.choice([1, 2, 3, 4]), self.random.choice([0, 0, 1])
        numbers = map(str, (procs, workers, self.epochs, HANG_TIMEOUT_S))
        command = [sys.executable, str(self.script), str(run_dir), *numbers]
        return subprocess.Popen(command, cwd=self.script.parent, stdout=self.log, stderr=self.log, text=True)

    def hit(self, number: int) -> str:
        """One life of the launcher, in the middle of which something happens."""
        launcher = self.start(self.run_dir)
        # Not before the run has begun to move, or else nothing is tested; then at any moment.
        self.wait_for_checkpoint(launcher)
        time.sleep(self.random.uniform(0, 0.7))
        code = launcher.poll()
        assert code is None, f"the run has ended with exit code {code} before it was hit; if 0, give it more epochs"
        deed = self.deeds[number % len(self.deeds)] if number < len(self.deeds) else self.random.choice(self.deeds)
        words = deed(launcher)
        code = self.end_of(launcher, words)
        between = self.breaks[number % len(self.breaks)]()
        return f"{words}; exit code {code}, newest checkpoint {self.newest()}; then {between}"

    def end_of(self, launcher: subprocess.Popen[str], words: str) -> int:
        """The exit code of a launcher that has to end by itself now."""
        try:
            return launcher.wait(timeout=120)
        except subprocess.TimeoutExpired:
            launcher.kill()
            raise AssertionError(f"the run hangs after: {words}") from None

    def wait_for_checkpoint(self, launcher: subprocess.Popen[str]) -> None:
        """Until there is a newer one, the run has ended or a minute has passed."""
        before, limit = self.newest(), time.monotonic() + 60
        while self.newest() <= before and launcher.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)

    def newest(self) -> int:
        return max((int(path.name[5:]) for path in self.run_dir.glob("checkpoints/step-*")), default=-1)

    def family(self, launcher: subprocess.Popen[str]) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """The fork server, and the ranks that it started."""
        try:
            fork_server = psutil.Process(launcher.pid).children()
            ranks = [child for one in fork_server for child in one.children()]
        except psutil.NoSuchProcess:
            return [], []
        return fork_server, [rank for rank in ranks if rank.status() != psutil.STATUS_ZOMBIE]

    # --- deeds: each ends with a launcher that ends by itself -------------------------------------------------

    def kill_rank(self, launcher: subprocess.Popen[str]) -> str:
        return self.kill_one(launcher, self.family(launcher)[1], "ranks")

    def kill_fork_server(self, launcher: subprocess.Popen[str]) -> str:
        return self.kill_one(launcher, self.family(launcher)[0], "fork servers")

    def kill_one(self, launcher: subprocess.Popen[str], processes: list[psutil.Process], what: str) -> str:
        if processes:
            with suppress(psutil.NoSuchProcess):
                self.random.choice(processes).kill()
        time.sleep(self.random.uniform(1, 6))  # the ranks start again meanwhile
        launcher.terminate()
        return f"SIGKILL to one of {len(processes)} {what}"

    def kill_launcher(self, launcher: subprocess.Popen[str]) -> str:
        launcher.kill()
        return "SIGKILL to the launcher"

    def terminate(self, launcher: subprocess.Popen[str]) -> str:
        launcher.terminate()
        return "SIGTERM"

    def cut_checkpoint(self, launcher: subprocess.Popen[str]) -> str:
        launcher.kill()
        launcher.wait()
        newest = self.run_dir / "checkpoints" / f"step-{self.newest():08d}"
        file = self.random.choice(sorted(newest.iterdir()))
        with file.open("r+b") as opened:
            opened.truncate(self.random.randrange(file.stat().st_size))
        return f"{newest.name}/{file.name} cut short"

    def fill_disk(self, launcher: subprocess.Popen[str]) -> str:
        with self.disk.full(self.family(launcher)[1]):
            time.sleep(2)
            is_alive = launcher.poll() is None
        time.sleep(1)
        launcher.terminate()
        return f"a full disk ({'survived' if is_alive else 'the run had ended'})"

    def pause_rank(self, launcher: subprocess.Popen[str]) -> str:
        return self.suspend_rank(launcher, self.random.uniform(0.1, 0.4) * HANG_TIMEOUT_S)

    def hang_rank(self, launcher: subprocess.Popen[str]) -> str:
        return self.suspend_rank(launcher, self.random.uniform(1.2, 1.6) * HANG_TIMEOUT_S)

    def suspend_rank(self, launcher: subprocess.Popen[str], seconds: float) -> str:
        """The same launcher must train on: it waits for the rank, or starts the ranks again."""
        words = f"SIGSTOP to a rank for {seconds:.1f} s"
        if ranks := self.family(launcher)[1]:
            rank = self.random.choice(ranks)
            with suppress(psutil.NoSuchProcess):
                rank.suspend()
            time.sleep(seconds)
            with suppress(psutil.NoSuchProcess):
                rank.resume()
        self.wait_for_checkpoint(launcher)
        launcher.terminate()
        code = self.end_of(launcher, words)
        assert code in (0, 3), f"{words} has ended the run with exit code {code}"
        return words

    def delete_folder(self, launcher: subprocess.Popen[str]) -> str:
        """The next attempt loses its folder and a rank, and must end; later ones continue with a copy."""
        launcher.kill()
        launcher.wait()
        copy = self.script.parent / "copy"
        shutil.copytree(self.run_dir, copy)
        doomed, message = self.start(self.run_dir), self.output.stat().st_size
        self.wait_for_checkpoint(doomed)
        ranks = self.family(doomed)[1]
        while self.run_dir.exists():  # ranks may write to it meanwhile
            shutil.rmtree(self.run_dir, ignore_errors=True)
        with suppress(psutil.NoSuchProcess, IndexError):
            self.random.choice(ranks).kill()
        code = self.end_of(doomed, "the run folder deleted")
        if code == 0:
            self.check_result()
        else:
            words = self.output.read_bytes()[message:].decode(errors="replace")
            assert str(self.run_dir) in words, "the run does not say that its folder is missing"
            assert "Traceback" not in words, words
        shutil.rmtree(self.run_dir, ignore_errors=True)
        shutil.copytree(copy, self.run_dir)
        shutil.rmtree(copy)
        return f"the run folder deleted, exit code {code}; put back"

    # --- between two attempts ---------------------------------------------------------------------------------

    def damage_file(self) -> str:
        """Cut a small file short, at times to nothing, as a machine that loses power may leave it."""
        names = ("config.yaml", "events.jsonl", "result.json")
        files = [*(self.run_dir / name for name in names), *sorted(self.run_dir.glob("logs/*.json"))]
        file = self.random.choice(files)
        size = file.stat().st_size if file.exists() else 0
        left = self.random.choice([0, self.random.randrange(size or 1)])
        with file.open("ab") as opened:
            opened.truncate(left)
        self.has_all_events = self.has_all_events and file.name != "events.jsonl"
        return f"{file.name} cut from {size} to {left} bytes"

    def rename_folder(self) -> str:
        self.run_dir = self.run_dir.rename(self.disk.path / f"run-{self.random.getrandbits(16)}")
        return f"the run folder renamed to {self.run_dir.name}"

    # --- the end ----------------------------------------------------------------------------------------------

    def check_result(self) -> dict[str, object]:
        """The result of the run, which must be that of the undisturbed one."""
        folders = (self.undisturbed, self.run_dir)
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        for key in SAME:
            assert results[0][key] == results[1][key], key
        return dict(results[1])

    def check_records(self) -> None:
        """What is recorded of steps must be equal, to the last digit; cut files may have lost some of it."""
        undisturbed, disturbed = (
            [
                tuple(event[name] for name in RECORDED)
                for event in read(folder / "events.jsonl")
                if event["event"] == "step"
            ]
            for folder in (self.undisturbed, self.run_dir)
        )
        if self.has_all_events:
            assert disturbed == undisturbed
        assert disturbed == [record for record in undisturbed if record in set(disturbed)]


def run_chaos(folder: Path, hits: int, seed: int) -> dict[str, object]:
    """Hits a run `hits` times, lets it end, and compares; raises AssertionError where they differ."""
    chaos = Chaos(folder, seed, epochs=3 * hits)
    try:
        code = chaos.start(chaos.undisturbed).wait(timeout=300)
        assert code == 0, f"the undisturbed run ended with exit code {code}"
        for number in range(hits):
            words = chaos.hit(number)
            print(f"{number + 1}/{hits}: {words}", flush=True)
        code = chaos.start(chaos.run_dir).wait(timeout=300)
        assert code == 0, f"the last attempt ended with exit code {code}"
        result = chaos.check_result()
        chaos.check_records()
        running = psutil.process_iter(["cmdline", "cwd"])
        ours = [p for p in running if "paceline.launch.fork_server" in " ".join(p.info["cmdline"] or [])]
        left = [p for p in ours if p.info["cwd"] == str(chaos.script.parent)]
        assert not left, left
        return result
    finally:
        chaos.log.close()
        chaos.disk.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hits", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    os.environ["PYTHONWARNINGS"] = "error"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as path:
        try:
            outcome = run_chaos(Path(path), arguments.hits, arguments.seed)
        except AssertionError:
            print((Path(path) / "output.txt").read_text()[-8000:], file=sys.stderr)
            raise
    print(f"the same weights after {arguments.hits} hits: {str(outcome['weights_sha256'])[:12]}")
