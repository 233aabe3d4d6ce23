"""Runs the notebooks of the documentation and writes their outputs into them: `make notebooks`.

Each notebook runs in an empty folder of its own, whose path is replaced in the outputs, like the name of the machine.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in this folder; raises CellExecutionError if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": folder}},
    ).execute()  # fmt: skip
    notebook.metadata.language_info = {"name": "python"}  # not the version of this Python
    return notebook


def main(names: list[str]) -> None:
    """Run the notebooks with these names, by default all."""
    for path in NOTEBOOKS:
        if names and path.stem not in names:
            continue
        with TemporaryDirectory() as folder:
            text = nbformat.writes(executed(path, Path(folder).resolve()))
            text = text.replace(str(Path(folder).resolve()), "/home/user/notebooks")
        text = text.replace(f";{socket.gethostname()}, ", ";laptop, ")  # in the data of a report
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path.name}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
