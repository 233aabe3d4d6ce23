"""Runs the notebooks of the documentation, and writes them as pages of the site.

`make notebooks` runs each notebook in an empty folder and writes its outputs into it. The path of that folder and the
name of the machine are replaced. `python scripts/notebooks.py --pages` writes a Markdown page beside each notebook.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> NotebookNode:
    """The notebook with the outputs of a run in this folder; raises CellExecutionError if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": folder}},
    ).execute()  # fmt: skip
    notebook.metadata.language_info = {"name": "python"}  # not the version of this Python
    return notebook


def run(path: Path) -> None:
    """Run a notebook and write its outputs into it."""
    with TemporaryDirectory() as folder:
        text = nbformat.writes(executed(path, Path(folder).resolve()))
        text = text.replace(str(Path(folder).resolve()), "/home/user/notebooks")
    text = text.replace(f";{socket.gethostname()}, ", ";laptop, ")  # in the data of a report
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{path.name}: {len(text) / 1e3:.0f} kB")


def page_of(notebook: NotebookNode) -> str:
    """A notebook as Markdown, with its outputs."""
    parts = list[str]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace(".ipynb)", ".md)"))
        else:
            parts += [f"```python\n{cell.source}\n```", *map(shown, ordered(cell.outputs))]
    return "\n\n".join(parts) + "\n"


def ordered(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """The outputs of a cell, first the progress that it printed while it ran."""
    yield from sorted(outputs, key=lambda output: output.get("name") != "stderr")


def shown(output: NotebookNode) -> str:
    """An output as a block of HTML."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return f"<div>{data[kind].strip()}</div>"
    return f'<div class="highlight"><pre><code>{escape(data["text/plain"].rstrip())}</code></pre></div>'


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if "--pages" in sys.argv:
            path.with_suffix(".md").write_text(page_of(nbformat.read(path, as_version=4)), encoding="utf-8")
        else:
            run(path)
