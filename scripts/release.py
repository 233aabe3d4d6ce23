"""Checks what a release needs: its version, the changelog, the working tree, the wheel and the documentation.

Prints what is missing, one sentence each, and changes nothing but dist/. Run it with `make release`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def missing_in_files(root: Path) -> list[str]:
    """What the version and the changelog lack."""
    version = version_of(root)
    imported = _first_group(root / "src" / "paceline" / "__init__.py", r'^__version__ = "(.+)"$')
    released = _first_group(root / "CHANGELOG.md", r"^## (\d\S*) - \d{4}-\d\d-\d\d$")
    found = []
    if imported != version:
        found.append(f"pyproject.toml has version {version}, src/paceline/__init__.py has {imported}; make them equal")
    if released != version:
        heading = f"`## {version} - YYYY-MM-DD`"
        found.append(f"the newest release in CHANGELOG.md is {released}, not {version}; add the heading {heading}")
    if _first_group(root / "CHANGELOG.md", r"^## Unreleased\n+([^#\n].*|#{3,} .*)$") is not None:
        found.append("CHANGELOG.md has entries below Unreleased; move them below the heading of the release")
    return found


def missing_in_git(root: Path) -> list[str]:
    """What is not committed, and a tag that another release has."""
    version = version_of(root)
    changed = [line[3:] for line in _git(root, "status", "--porcelain").splitlines()]
    found = []
    if changed:
        found.append(f"these changes are not committed: {', '.join(changed)}; commit or remove them")
    if _git(root, "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists already; raise the version in pyproject.toml and __init__.py")
    return found


def missing_in_builds(root: Path) -> list[str]:
    """The targets of the Makefile that fail: the wheel, and the documentation if this checkout has a site."""
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = {"wheel": "the wheel", "docs": "the documentation"}
    defined = [target for target in targets if re.search(rf"^{target}:", makefile, re.MULTILINE)]
    failed = [target for target in defined if subprocess.run(["make", target], cwd=root, check=False).returncode]
    return [f"{targets[target]} has errors, see above; repeat it with `make {target}`" for target in failed]


def version_of(root: Path) -> str | None:
    """The version of the project."""
    return _first_group(root / "pyproject.toml", r'^version = "(.+)"$')


def _first_group(path: Path, pattern: str) -> str | None:
    """The first group of a pattern where it first occurs in a file; None if it does not."""
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def main() -> None:
    # The builds take a minute; they follow when the rest is complete.
    missing = [*missing_in_files(ROOT), *missing_in_git(ROOT)] or missing_in_builds(ROOT)
    if missing:
        sys.exit("not ready for a release:\n" + "\n".join(f"  - {each}" for each in missing))
    version = version_of(ROOT)
    print(f"{version} is ready in dist/; if CI passes: git tag v{version}, git push --tags, twine upload dist/*")


if __name__ == "__main__":
    main()
