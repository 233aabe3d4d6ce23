"""Builds the source archive and the wheel in dist/, installs the wheel in an empty environment and runs the first page
of the README there.

The environment has what the metadata of the wheel requires, in the versions of constraints.txt, and nothing else, not
even pip. Run it with `make wheel`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
# The project of the README is one with a loop of its own; this is the other one.
FURTHER_LINES = "cd .. && paceline init managed --managed && cd managed && python main.py"


def first_lines(readme: str) -> list[str]:
    """The commands of the README's first page: all blocks between its title and the first section about Python."""
    page, found, _ = readme.partition("\n## Your own loop\n")
    lines = "".join(re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).splitlines()
    assert found, "the README has no section `Your own loop`"
    assert lines[:1] == ["pip install paceline"], "the README does not begin with the installation"
    return lines


def build() -> Path:
    """The wheel, built from the source archive as pip does it."""
    for old in DIST.glob("paceline-*"):
        old.unlink()
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *DIST.glob("paceline-*")], check=True)
    [wheel] = DIST.glob("paceline-*.whl")
    return wheel


def check_content(wheel: Path) -> None:
    """Stop if the wheel has other files than the package: a recipe's data, a template or py.typed may be missing."""
    source = ROOT / "src"
    expected = {str(path.relative_to(source)) for path in (source / "paceline").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if differing := {name for name in expected ^ found if not name.endswith(".pyc")}:
        sys.exit(f"{wheel.name} and src/paceline differ in {', '.join(sorted(differing))}")


def install(wheel: Path, folder: Path) -> None:
    """Create an environment that has only the wheel and its requirements."""
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", *constraints, wheel], check=True)


def run(lines: list[str], environment: Path, folder: Path) -> None:
    """Run shell commands with the programs of an environment, in a folder of their own, to the first one that fails."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE"))}
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**inherited, "PATH": path, "PYTHONWARNINGS": "error"}
    subprocess.run(["bash", "-exc", "\n".join(lines)], cwd=folder, env=variables, check=True)


def main() -> None:
    lines = first_lines((ROOT / "README.md").read_text(encoding="utf-8"))
    wheel = build()
    check_content(wheel)
    with tempfile.TemporaryDirectory() as created:
        environment, folder = Path(created, "environment"), Path(created, "work")
        folder.mkdir()
        install(wheel, environment)
        run(["paceline --version", *lines[1:], FURTHER_LINES], environment, folder)
    print(f"{wheel.name} runs the first page of the README")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{Path(__file__).name}: exit code {error.returncode} of {' '.join(map(str, error.cmd))}")
