from __future__ import annotations

import pytest

from paceline.formatting import printable, size_text


def test_control_characters_are_escaped_and_text_is_kept() -> None:
    assert printable("a\tb\nc é 中 👩\u200d🔬 \\x1b") == "a\tb\nc é 中 👩\u200d🔬 \\x1b"
    assert printable("\x1b]0;title\x07 \x1b[2J \x9b31m \r \x00 \x7f") == (
        "\\x1b]0;title\\x07 \\x1b[2J \\x9b31m \\r \\x00 \\x7f"
    )
    assert printable("invoice\u202efdp.exe \udc80") == "invoice\\u202efdp.exe \\udc80"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 kB"), (2_900, "2.9 kB"), (3_100_000, "3.1 MB"), (4_250_000_000, "4.2 GB")]
)
def test_sizes_have_a_suitable_unit(size: int, text: str) -> None:
    assert size_text(size) == text
