"""`paceline doctor`: the findings that follow from facts, how facts are read, and the config of a rehearsal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from paceline.config import Config, build
from paceline.data.sources import make_datasets
from paceline.errors import ConfigError, RankFailed
from paceline.tools.doctor import checks, doctor, facts, rehearsal, trials
from paceline.tools.doctor.checks import Finding, RehearsalResult
from paceline.tools.doctor.facts import Gpu, Interface, MachineFacts
from paceline.tools.doctor.plan import RankPlan, plan_of

GB = 1 << 30
GOOD = MachineFacts(
    system="Linux 6 x86_64", python="3.12.1", torch="2.11.0+cu128", has_gloo=True, cuda="12.8", nccl="2.27.5",
    usable_gpus=2, gpu_warning=None, driver="570.1", gpus=(Gpu("H200", 143_000, 500), Gpu("H200", 143_000, 500)),
    cores=8, cores_of_machine=8, core_quota=None, memory=64 * GB, free_memory=32 * GB, free_shared_memory=8 * GB,
    open_files=1024, folder=Path("/lab"), free_disk=100 * GB, is_writable=True,
    interfaces=(Interface("lo", "127.0.0.1", 0), Interface("eth0", "192.0.2.7", 10_000)), infiniband=("mlx5_0",),
)  # fmt: skip
NO_GPU: dict[str, Any] = {"usable_gpus": 0, "driver": None, "gpus": (), "cuda": None, "nccl": None}


def test_a_good_machine_is_reported_in_full_without_advice() -> None:
    found = {finding.name: finding for finding in checks.check_machine(GOOD)}
    assert {(finding.state, finding.advice) for finding in found.values()} == {("ok", "")}
    assert found["gpu"].text == "2 usable by torch; 2 × H200, driver 570.1"
    assert found["nccl"].text == "2.27.5"
    assert found["network"].text == "lo (127.0.0.1), eth0 (192.0.2.7, 10 Gbit/s); InfiniBand: mlx5_0"
    without = {finding.name: finding for finding in checks.check_machine(replace(GOOD, **NO_GPU))}
    assert without["gpu"] == Finding("gpu", "ok", "none; runs use the CPU")
    assert "nccl" not in without


@pytest.mark.parametrize(
    ("changes", "name", "state", "words"),
    [
        ({"torch": "2.9.1"}, "torch", "failure", "2.11 or newer"),
        ({"has_gloo": False}, "torch", "failure", "with Gloo"),
        ({"usable_gpus": 0, "cuda": None}, "gpu", "warning", "built for CUDA"),
        ({"usable_gpus": 0, "gpu_warning": "driver too old"}, "gpu", "warning", "(driver too old)"),
        ({"gpus": (Gpu("H200", 143_000, 90_000),)}, "gpu", "warning", "GPU 0 has 90,000 of 143,000 MB in use"),
        ({"gpus": (), "driver": None}, "gpu", "ok", "driver unknown"),
        ({"nccl": None}, "nccl", "failure", "backend: gloo"),
        ({"core_quota": 1.5}, "cores", "warning", "OMP_NUM_THREADS=1 "),
        ({"free_memory": GB}, "memory", "warning", "1.1 GB free of 68.7 GB"),
        ({"free_shared_memory": 64 << 20}, "shared memory", "warning", "--shm-size"),
        ({"open_files": 256}, "open files", "warning", "ulimit -n"),
        ({"open_files": -1}, "open files", "ok", "no limit"),
        ({"is_writable": False}, "disk", "failure", "/lab cannot be written to"),
        ({"free_disk": GB // 2}, "disk", "warning", "--run-dir"),
        ({"interfaces": GOOD.interfaces[1:]}, "network", "failure", "no loopback"),
    ],
)
def test_each_problem_of_a_machine_is_one_finding(changes: dict[str, Any], name: str, state: str, words: str) -> None:
    findings = list(checks.check_machine(replace(GOOD, **changes)))
    [found] = [finding for finding in findings if finding.name == name]
    assert found.state == state
    assert words in f"{found.text} {found.advice}"
    assert bool(found.advice) == (state != "ok")
    assert {finding.state for finding in findings if finding is not found} == {"ok"}


def test_more_ranks_than_cores_give_a_warning() -> None:
    assert checks.check_ranks(8, "cuda", "nccl", GOOD) == Finding(
        "ranks", "ok", "8 ranks on cuda (nccl) on this machine"
    )
    assert checks.check_ranks(9, "cpu", "gloo", GOOD).advice == "use --procs 8 or less"


def test_a_rehearsal_is_good_only_with_a_finite_loss() -> None:
    result = RehearsalResult(2, 3.14, loss=0.5, metrics=(("accuracy", 0.25),), memory=400_000_000)
    expected = "one step on the CPU with 2 ranks, 3.1 s, 400.0 MB per rank: loss 0.5, accuracy 0.25"
    assert checks.check_rehearsal(result) == Finding("rehearsal", "ok", expected)
    for loss in (None, math.nan, math.inf):
        assert checks.check_rehearsal(replace(result, loss=loss)).state == "warning"
    own = checks.check_rehearsal(RehearsalResult(1, 3.0, is_own_loop=True))
    assert own.state == "ok"
    assert "train_fn was not called" in own.text


@pytest.mark.parametrize(("copies", "state"), [(1.9, "failure"), (2.1, "warning"), (4.9, "warning"), (5.1, "ok")])
def test_checkpoints_need_space_for_those_kept_the_best_and_the_one_being_written(
    make_config: Callable[..., Config], copies: float, state: str
) -> None:
    config = make_config(checkpoint={"keep": 3, "best": {"metric": "val_loss"}})
    machine = replace(GOOD, free_disk=int(copies * GB))
    assert checks.check_checkpoints(GB, config, machine).state == state


def test_ranks_on_the_cpu_must_fit_into_memory() -> None:
    result = RehearsalResult(2, 1.0, memory=10 * GB)
    states = [checks.check_rank_memory(result, ranks, "cpu", GOOD) for ranks in (3, 4)]
    assert [found.state for found in states if found is not None] == ["ok", "warning"]
    alone = checks.check_rank_memory(result, 1, "cpu", GOOD)
    assert alone is not None
    assert alone.text.startswith("1 rank needs more than ")
    assert checks.check_rank_memory(result, 4, "cuda", GOOD) is None


def test_bandwidth_is_the_bytes_through_each_rank() -> None:
    assert checks.bytes_per_s(16_000_000, 0.01, 2) == pytest.approx(1.6e9)
    assert checks.bytes_per_s(16_000_000, 0.01, 4) == pytest.approx(2.4e9)
    assert checks.check_bandwidth(16_000_000, 0.01, 2, "gloo").state == "ok"
    assert checks.check_bandwidth(16_000_000, 0.01, 2, "nccl").advice == "check the output of `nvidia-smi topo -m`"


def test_every_failure_has_advice() -> None:
    assert checks.failure_of("config", "a=1 is wrong; use a: 2") == Finding(
        "config", "failure", "a=1 is wrong", "use a: 2"
    )
    assert checks.failure_of("config", "a=1 is wrong").advice == checks.FIX_IT


# --- facts ----------------------------------------------------------------------------------------------------------


def test_the_facts_of_this_machine_are_gathered() -> None:
    machine = facts.gather(Path("runs/lab"))
    assert machine.torch == torch.__version__
    assert machine.folder == Path.cwd()  # `runs` does not exist yet
    assert machine.is_writable
    assert any(interface.address == "127.0.0.1" for interface in machine.interfaces)
    assert 0 < (machine.free_memory or 1) <= (machine.memory or 1)


def test_the_output_of_nvidia_smi_is_parsed() -> None:
    text = "570.1, NVIDIA H200, 143771, 12\n570.1, NVIDIA GB10, [N/A], [N/A]\n"
    expected = (Gpu("NVIDIA H200", 143771, 12), Gpu("NVIDIA GB10", None, None))
    assert facts.parse_gpus(text) == ("570.1", expected)
    assert facts.parse_gpus("No devices were found\n") == (None, ())


def test_the_lowest_limit_of_nested_control_groups_applies(tmp_path: Path) -> None:
    inner = tmp_path / "sys/fs/cgroup/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/\n0::/job/step\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("900\n")
    (inner.parent / "memory.stat").write_text("anon 300\ninactive_file 500\n")
    groups = facts.own_cgroups(tmp_path)
    assert groups == [inner, inner.parent, inner.parent.parent]
    assert facts.core_quota(groups) == 1.5
    assert [facts.free_memory_in(group) for group in groups] == [None, 600, None]
    assert facts.own_cgroups(tmp_path / "elsewhere") == []


# --- the config -----------------------------------------------------------------------------------------------------


def examined(path: Path | None, procs: str | None = None) -> list[Finding]:
    return list(doctor.examine(path, [], procs))


def test_every_mistake_in_a_config_is_a_failure_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model_fn: 'nowhere:model'\ndataset_fn: 'torch:zeros'\nloss_fn: mse_loss\nbatchsize: 3\n")
    failures = [finding for finding in examined(path) if finding.state == "failure"]
    assert [finding.name for finding in failures] == ["config", "config"]
    assert failures[0] == Finding("config", "failure", "batchsize is not a known key", "did you mean batch_size?")
    assert failures[1].text.startswith("model_fn='nowhere:model' names a module that does not exist: nowhere.py in")
    path.write_text("model_fn: [\n")
    assert [finding.name for finding in examined(path) if finding.state == "failure"] == ["config"]
    assert [finding.text for finding in examined(None, "x") if finding.state == "failure"] == [
        "procs='x' must be a number of processes, or least:most such as 1:4"
    ]


def test_a_config_that_cannot_be_pickled_is_not_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stuck.py").write_text(
        "import threading\n\nclass Model:\n    lock = threading.Lock()\n    def __init__(self): self.own = self.lock\n"
        "    def __call__(self): ...\n\nmake = Model()\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text("model_fn: 'stuck:make'\ndataset_fn: 'torch:zeros'\nloss_fn: mse_loss\n")
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: pytest.fail("it was rehearsed"))
    last = examined(path)[-1]
    assert (last.name, last.state) == ("pickling", "failure")
    assert "model_fn" in last.text
    assert last.advice


def test_a_run_that_could_not_start_has_no_plan(make_config: Callable[..., Config]) -> None:
    assert plan_of(make_config(device="cpu", lanes=6, procs=3)) == RankPlan(3, "cpu", "gloo")
    with pytest.raises(ConfigError, match="lanes=6 cannot be"):
        plan_of(make_config(device="cpu", lanes=6, procs=7))


def test_the_interface_towards_the_rendezvous_is_named() -> None:
    assert trials.check_rendezvous("127.0.0.1:29400", GOOD).text == "127.0.0.1:29400 is reached over lo"
    failure = trials.check_rendezvous("no-such-host.invalid:29400", GOOD)
    assert failure.state == "failure"
    assert failure.text.startswith("no-such-host.invalid:29400 cannot be reached: ")


@pytest.mark.parametrize(
    ("error", "is_kept", "words"),
    [
        (RankFailed("its log"), True, "its log"),
        (ConfigError("a mistake"), False, "a mistake"),
        (KeyboardInterrupt("the run folder is …"), False, ""),
    ],
)
def test_the_temporary_run_folder_is_kept_only_for_the_log_of_a_rank_that_failed(
    tmp_path: Path, error: BaseException, is_kept: bool, words: str
) -> None:
    with pytest.raises(type(error)) as raised, trials.temporary_run_folder(replace(GOOD, folder=tmp_path)) as folder:
        raise error
    assert str(raised.value) == words
    assert folder.exists() == is_kept
    with trials.temporary_run_folder(replace(GOOD, folder=tmp_path)) as folder:
        assert folder.parent == tmp_path
    assert not folder.exists()


def test_a_temporary_run_folder_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    machine = replace(GOOD, folder=tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot be created: No such file"), trials.temporary_run_folder(machine):
        pass


def test_a_rehearsal_is_short_and_local_and_logs_little() -> None:
    config = build(
        {
            "model_fn": torch.nn.Sequential, "dataset_fn": list, "loss_fn": "mse_loss", "batch_size": 512, "lanes": 64,
            "workers": 8, "num_epochs": 90, "nodes": 4, "rendezvous": "n1:1", "step_mode": "graph", "resume": "auto",
            "checkpoint": {"every_steps": 1}, "sync_batchnorm": True, "exact": False, "backend": "nccl",
        }
    )  # fmt: skip
    short = rehearsal.shortened(config, 2, Path("there"))
    rebuilt = build({key: value for key, value in short.__dict__.items() if key != "folder"})  # no keys in conflict
    assert (rebuilt.batch_size, rebuilt.lanes, rebuilt.workers, rebuilt.max_steps, rebuilt.procs) == (8, None, 1, 1, 2)
    assert (rebuilt.device, rebuilt.nodes, rebuilt.resume, rebuilt.run_dir) == ("cpu", None, "never", Path("there"))
    assert not rebuilt.log.tensorboard
    assert rebuilt.checkpoint.every_steps is None


@pytest.mark.parametrize(
    ("keys", "training_size"),
    [
        ({"val_dataset_fn": lambda: list(range(50))}, 100),
        ({"val_df": pd.DataFrame({"x": range(50)})}, 100),
        ({"val_fraction": 0.5}, 16),
    ],
)
def test_a_rehearsal_uses_data_of_the_run_and_validates_on_8_samples(
    make_config: Callable[..., Config], keys: dict[str, Any], training_size: int
) -> None:
    calls = []

    def dataset(*table: Any, scale: int) -> list[int]:
        calls.append(scale)
        return [scale * number for number in range(50 if table else 100)]

    config = make_config(dataset_fn=dataset, dataset_args={"scale": 3}, **keys)
    training, validation = make_datasets(rehearsal.shortened(config, 2, Path("there")))
    assert calls == [3] * (2 if "val_df" in keys else 1)
    assert validation is not None
    assert (len(training), len(validation)) == (training_size, 8)
    whole = set(range(0, 300, 3))
    assert set(training) <= whole
    assert max(training) > 200  # from the whole data set, which may be sorted by class
    if "val_fraction" in keys:
        assert not set(validation) & set(training)
        assert set(validation) <= whole
    else:
        step = 3 if "val_df" in keys else 1
        assert list(validation) == [step * number for number in range(0, 48, 6)]


def test_data_without_a_length_and_data_without_validation_are_rehearsed_as_they_are(
    make_config: Callable[..., Config],
) -> None:
    stream = rehearsal.shortened(make_config(dataset_fn=lambda: {1, 2, 3}), 2, Path("there"))
    assert make_datasets(stream) == ({1, 2, 3}, None)
    whole = rehearsal.shortened(make_config(dataset_fn=lambda: list(range(100)), val_fraction=0), 2, Path("there"))
    assert make_datasets(whole) == (list(range(100)), None)
    empty = rehearsal.shortened(make_config(dataset_fn=list), 2, Path("there"))
    with pytest.raises(ConfigError, match="dataset_fn returned an empty data set"):
        make_datasets(empty)
