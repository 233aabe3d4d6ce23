"""Paceline under torchrun, whose process group it joins."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path


def test_a_recipe_gives_the_same_weights_under_torchrun_and_by_local_processes(run, tmp_path: Path) -> None:
    local = run("paceline", "train", "linear", "--procs", "2", "--run-dir", "local", "threads=1")
    joined = run(
        "torchrun",
        "--nproc_per_node=2",
        "-m",
        "paceline",
        "train",
        "linear",
        "--run-dir",
        "joined",
        "threads=1",
    )
    assert (local.returncode, joined.returncode) == (0, 0), local.stderr + joined.stderr
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("local", "joined")]
    assert all(result.pop("seconds") > 0 for result in results)
    assert results[0] == results[1]
    assert results[0]["world_size"] == 2


def test_two_starts_in_one_script_and_torch_distributed_debug_except_detail(run, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
        import os
        import sys
        import torch
        from paceline import Trainer
        from torch.utils.data import TensorDataset

        def train(model, train_loader, val_loader, device, num_epochs):
            return os.environ["TORCH_DISTRIBUTED_DEBUG"], torch.distributed.get_world_size()

        data = lambda: TensorDataset(torch.randn(8, 1))
        procs = sys.argv[1] if len(sys.argv) > 1 else None
        for _ in range(2):
            result = Trainer(lambda: torch.nn.Linear(1, 1), data, train_fn=train, val_fraction=0, procs=procs).start()
            sys.stdout.write(f"rank {os.environ.get('RANK')} {result.value}\\n")  # in one piece, beside the other rank
        """)
    )
    ended = run("torchrun", "--nproc_per_node=2", "main.py", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        assert ended.stdout.count(f"rank {rank} ('INFO', 2)") == 2
    warning = "warning: TORCH_DISTRIBUTED_DEBUG=DETAIL crashes torch's DistributedDataParallel; INFO is used instead"
    assert ended.stderr.count(warning) == 1
    alone = run("python", "main.py", TORCH_DISTRIBUTED_DEBUG="INFO")
    assert alone.stdout.count("rank None ('INFO', 1)") == 2, alone.stderr
    assert "TORCH_DISTRIBUTED_DEBUG" not in alone.stderr
    two = run("python", "main.py", "2", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert two.stdout.count("rank None ('INFO', 2)") == 2, two.stderr
    assert two.stderr.count(warning) == 2  # one for each run


def test_a_loop_may_leave_the_process_group_and_keep_its_workers(run, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
        import os
        import sys
        import torch
        from paceline import Trainer
        from torch.utils.data import TensorDataset

        def train(model, train_loader, val_loader, device, num_epochs):
            sys.kept = iter(train_loader)
            next(sys.kept)
            torch.distributed.destroy_process_group()
            return "left"

        data = lambda: TensorDataset(torch.randn(8, 1))
        result = Trainer(lambda: torch.nn.Linear(1, 1), data, train_fn=train, val_fraction=0, workers=1).start()
        sys.stdout.write(f"rank {os.environ.get('RANK')} {result.value}\\n")
        """)
    )
    ended = run("torchrun", "--nproc_per_node=2", "main.py")
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank} left" in ended.stdout for rank in (0, 1))


def test_a_failure_under_torchrun_names_rank_and_line(run, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
        import torch
        from paceline import Trainer
        from torch.utils.data import TensorDataset

        def train(model, train_loader, val_loader, device, num_epochs):
            if torch.distributed.get_rank() == 1:
                raise ValueError("broken here")
            torch.distributed.barrier()

        data = lambda: TensorDataset(torch.randn(8, 1))
        Trainer(lambda: torch.nn.Linear(1, 1), data, train_fn=train, val_fraction=0).start()
        """)
    )
    ended = run("torchrun", "--nproc_per_node=2", "main.py")
    assert ended.returncode == 1
    assert "rank 1 on " in ended.stderr
    assert "ValueError: broken here" in ended.stderr
    assert f"at {tmp_path / 'main.py'}:8" in ended.stderr


def test_a_mistake_that_only_a_rank_can_see_ends_the_rank_with_exit_code_2(run) -> None:
    ended = run("torchrun", "--nproc_per_node=1", "-m", "paceline", "train", "linear", "model_fn=builtins:dict")
    assert "paceline: model_fn returned a dict" in ended.stderr
    assert "rank 0 on " not in ended.stderr
    assert "exitcode  : 2 " in ended.stderr


def test_missing_variables_of_torchrun_are_reported(run_here) -> None:
    ended = run_here("paceline", "train", "linear", "--launcher", "torchrun")
    assert ended.returncode == 2
    assert "RANK and WORLD_SIZE are not set" in ended.stderr
