"""The words of the sources and the documentation: those of the field, none that only this project would use."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".md", ".yaml", ".js", ".html", ".slurm")
UNWANTED = {  # a pattern, and words to use instead
    r"nobody|somebody|whoever|wherever": "no process, any user, if",
    r"anew|alike|likewise|thereby|hereby|thereof|thereafter|whence|forevermore": "again, identically, also, by this",
    r"so many|such and such|good for": "the number, the name, the purpose",
    r"(is|are|was|were) told|tells? (how|which|what|whether)": "receives, reports, logs, prints",
    r"(go|goes|going|went) on": "continue, resume",
    r"ride|rides|ridden": "run, process",
    r"(is|are|was|were) born|lives|births?": "has ended, starts, is stored",
    r"(come|comes|coming) (again|back)": "restart, join, resume",
    r"(lie|lies|lay) (on|in|by|at|below)": "is on, is stored in, is (channels-last)",
    r"room for": "free space, capacity, buffer",
    r"must not know|knows? nothing|(file|key|config|test|model|step) knows": "must not depend on, does not depend on",
    r"everything is saved": "checkpoint saved",
    r"hopeless|mends?": "poor, fix",
    r"write for instance|give for example": "write, for example,",
    # Not a matter of style: 3 ranks may process 4 lanes.
    r"ranks must divide|(processes|ranks)\s+that\s+divides?\s+`?lanes": "up to `lanes`",
}


def texts() -> list[Path]:
    """The files that users and contributors read, without libraries of others."""
    found = [ROOT / "README.md"]
    for folder in ("src", "docs"):
        paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
        found += [path for path in paths if not {"uplot", "notebooks"} & {*path.parts}]  # others' code, printed output
    return found


def test_words_are_those_of_the_field() -> None:
    any_of_them = re.compile(rf"\b({'|'.join(UNWANTED)})\b", re.IGNORECASE)
    found = []
    for path in texts():
        text = path.read_text(encoding="utf-8")
        for match in any_of_them.finditer(text):
            place = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
            instead = next(
                words for pattern, words in UNWANTED.items() if re.fullmatch(pattern, match[0], re.IGNORECASE)
            )
            found.append(f"{place}: {match[0]!r}; write, for example: {instead}")
    assert not found, "\n".join(found)
