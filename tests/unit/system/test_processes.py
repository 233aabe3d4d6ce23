"""Other processes of Paceline."""

from __future__ import annotations

import subprocess
from pathlib import Path

from paceline.system.processes import command_of


def test_a_process_imports_nothing_from_its_working_folder() -> None:
    for name in ("json.py", "argparse.py", "typing.py", "paceline.py"):
        Path(name).write_text("raise SystemExit('the wrong module')")
    Path("given.json").write_text('{"a": [1]}')
    done = subprocess.run(
        command_of("json.tool", "--compact", "given.json"), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ('{"a":[1]}\n', "")
