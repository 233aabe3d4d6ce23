"""words.py: text that is safe to print."""

from __future__ import annotations

from paceline.words import printable


def test_control_characters_become_visible_and_text_stays() -> None:
    assert printable("a\tb\nc é 中 👩\u200d🔬 \\x1b") == "a\tb\nc é 中 👩\u200d🔬 \\x1b"
    assert printable("\x1b]0;title\x07 \x1b[2J \x9b31m \r \x00 \x7f") == (
        "\\x1b]0;title\\x07 \\x1b[2J \\x9b31m \\r \\x00 \\x7f"
    )
    assert printable("invoice\u202efdp.exe \udc80") == "invoice\\u202efdp.exe \\udc80"
