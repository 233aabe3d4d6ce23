"""`make release` and `make wheel`: what they find missing, and what they read from the README."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
RELEASE = runpy.run_path(str(ROOT / "scripts" / "release.py"))
WHEEL = runpy.run_path(str(ROOT / "scripts" / "check_wheel.py"))
CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-01-31\n\n- Two.\n\n## 1.1.0 - 2026-01-01\n\n- One.\n"


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is ready for the release of 1.2.0."""
    files = {
        "pyproject.toml": '[project]\nversion = "1.2.0"\n',
        "src/paceline/__init__.py": '__version__ = "1.2.0"\n',
        "CHANGELOG.md": CHANGELOG,
        "Makefile": "setup:\n\ttrue\nwheel: setup\n\ttest ! -e broken\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init"], ["add", "."], ["commit", "-m", "Prepare 1.2.0"]):
        git(tmp_path, *words)
    return tmp_path


def missing(checkout: Path) -> list[str]:
    return [each for part in ("files", "git", "builds") for each in RELEASE[f"missing_in_{part}"](checkout)]


def test_a_checkout_that_is_ready_misses_nothing(checkout: Path) -> None:
    assert missing(checkout) == []


def test_each_thing_that_is_missing_is_named_in_one_sentence(checkout: Path) -> None:
    git(checkout, "tag", "v1.3.0")
    (checkout / "pyproject.toml").write_text('[project]\nversion = "1.3.0"\n')
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace("Unreleased\n", "Unreleased\n\n### Added\n\n- Three.\n"))
    (checkout / "broken").touch()
    with (checkout / "Makefile").open("a") as makefile:
        makefile.write("docs:\n\tfalse\n")
    changed = "CHANGELOG.md, Makefile, pyproject.toml, broken"
    assert missing(checkout) == [
        "pyproject.toml has version 1.3.0, src/paceline/__init__.py has 1.2.0; make them equal",
        "the newest release in CHANGELOG.md is 1.2.0, not 1.3.0; add the heading `## 1.3.0 - YYYY-MM-DD`",
        "CHANGELOG.md has entries below Unreleased; move them below the heading of the release",
        f"these changes are not committed: {changed}; commit or remove them",
        "the tag v1.3.0 exists already; raise the version in pyproject.toml and __init__.py",
        "the wheel has errors, see above; repeat it with `make wheel`",
        "the documentation has errors, see above; repeat it with `make docs`",
    ]


def test_the_version_is_the_newest_in_the_changelog() -> None:
    assert [each for each in RELEASE["missing_in_files"](ROOT) if "Unreleased" not in each] == []


def test_the_first_page_of_the_readme_installs_trains_and_makes_a_project() -> None:
    lines = WHEEL["first_lines"]((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [line.partition("#")[0].strip() for line in lines]
    assert commands == [
        "pip install paceline", "paceline train digits --procs 2", "paceline report",
        "paceline init lab", "cd lab", "python main.py",
    ]  # fmt: skip


def test_the_readme_has_every_extra() -> None:
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| extra | for |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))


@pytest.mark.parametrize("name", ["bug", "feature", "question"])
def test_an_issue_form_can_be_filled_in(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [field["id"] for field in form["body"]]
    assert len(set(fields)) == len(fields)
    assert all(field["attributes"]["label"] for field in form["body"])
