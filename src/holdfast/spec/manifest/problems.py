"""What is wrong with a manifest, or does nothing in it: where, what, which name was meant, and how it is mended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHOWN_MAX = 100  # of one file; who has more mends those first
CHARS_MAX = 400  # of a path, and of what is said of it: a name or a value may be as long as the file


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One finding; its text is one line."""

    line: int
    path: str  # as kubectl writes it: spec.services.Worker.envs[0].name; "": the whole file
    what: str
    nearest: str = ""  # the known name that was probably meant
    mend: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}: {_printable(self.path)}: " if self.path else f"line {self.line}: "
        meant = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{where}{_printable(self.what)}{meant}" + (f"; {_printable(self.mend)}" if self.mend else "")


def _printable(text: str) -> str:
    """On one line of a terminal, whatever a file has in its names."""
    if len(text) > CHARS_MAX:
        text = f"{text[: CHARS_MAX - 1]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def in_order(found: Iterable[Problem]) -> tuple[Problem, ...]:
    """By line; of very many the first."""
    everything = sorted(set(found))
    shown, rest = everything[:SHOWN_MAX], everything[SHOWN_MAX:]
    return (*shown, Problem(rest[0].line, "", f"and {len(rest)} more")) if rest else tuple(shown)


def inside(path: str, name: str) -> str:
    """The path of a field."""
    return f"{path}.{name}" if path else name
