"""What an error shows."""

import pytest

from shardwise.errors import JobError, printable, render


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\x9b2Jb", "a\\x9b2Jb"),
        ("\x1b]8;;http://x\x07link", "\\x1b]8;;http://x\\x07link"),
        ("up\rdown", "up\\rdown"),
        ("txt\u202egpj.exe", "txt\\u202egpj.exe"),
        ("\ud800", "\\ud800"),
        ("lines\n\tand tabs, 漢字, é, 👩‍💻", "lines\n\tand tabs, 漢字, é, 👩‍💻"),
    ],
)
def test_text_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert render(JobError(text, where=text)) == f"error: {shown}\n  at:  {shown}"
