"""Scripts on several NCCL ranks that share one GPU: NCCL accepts that if each claims to be a host of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

AS_HOST = """
import os

os.environ.update(NCCL_HOSTID=f"host-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
"""  # before torch makes the process group


def torchrun(
    folder: Path, script: str, ranks: int, *arguments: object, max_restarts: int = 0, timeout_s: float = 150
) -> None:
    """Run a script with these arguments on some ranks, in this folder; it must succeed."""
    (folder / "main.py").write_text(AS_HOST + script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    ended = subprocess.run(
        [*torchrun, f"--max-restarts={max_restarts}", "main.py", *map(str, arguments)], cwd=folder, check=False,
        capture_output=True, text=True, timeout=timeout_s,
        env={**os.environ, "PYTHONWARNINGS": "default"},  # torch's compiler has warnings of its own
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
