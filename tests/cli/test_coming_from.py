"""The pages for users of other libraries: both programs of a page are those in the files, and both learn."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from test_programs import PROGRAMS

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "programs" / "coming_from"
PAGES = sorted(DOCS.glob("from_*.md"))
LIBRARIES = {"torchrun": "torch"}


def programs_of(page: Path) -> list[Path]:
    """The programs that a page links to: theirs and ours."""
    return [DOCS / link for link in re.findall(r"\]\((programs/\w+/\w+\.py)\)", page.read_text(encoding="utf-8"))]


def accuracy_in(printed: str) -> float:
    """The accuracy in the last line of a program's output."""
    found = re.fullmatch(r"accuracy (\d\.\d+)", printed.splitlines()[-1])
    assert found is not None, printed[-2000:]
    return float(found[1])


def test_every_program_is_on_a_page() -> None:
    assert {page.stem for page in PAGES} >= {"from_lightning", "from_accelerate", "from_transformers", "from_torchrun"}
    assert {path for page in PAGES for path in programs_of(page)} == set(FOLDER.glob("*.py"))
    assert set(FOLDER.glob("*.py")).isdisjoint(PROGRAMS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_programs_as_they_are(page: Path) -> None:
    shown = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown == [path.read_text(encoding="utf-8") for path in programs_of(page)]
    assert "](coming_from.md)" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_of_the_other_library_learns_with_the_command_on_the_page(
    page: Path, run_in, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = page.stem.removeprefix("from_")
    pytest.importorskip(LIBRARIES.get(library, library))
    theirs = programs_of(page)[0]
    [command] = re.findall(
        rf"^((?:python|torchrun) .*\b){theirs.name}$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    variables = {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

    def run_theirs():
        return run_in(tmp_path_factory.mktemp("theirs"), *command.split(), str(theirs), **variables)

    ended = run_theirs()
    if "terminate called without an active exception" in ended.stderr:  # torch's own, at the exit of a foreign program
        ended = run_theirs()
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert accuracy_in(ended.stdout) > 0.95


OURS = sorted({programs_of(page)[1] for page in PAGES})


@pytest.mark.parametrize("program", OURS, ids=lambda program: program.stem)
def test_our_program_learns_as_well(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "transformers" in program.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = runpy.run_path(str(program), run_name="__main__")["result"]
    assert result.world_size == 2
    assert accuracy_in(capsys.readouterr().out) > 0.95
