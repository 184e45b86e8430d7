"""What `--help` shows: a command's sentence and its options by panel, or the commands there are. Pure.

Always true: no line is wider than the screen, or than `WIDTH_MAX`; a sentence begins in the same column in one page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.spec.arguments import Options, kind_of, takes_many
from holdfast.spec.settings import Setting

WIDTH_MIN, WIDTH_MAX = 40, 120
LEFT_MAX = 30  # of the column with the flags; what is longer has a line of its own
PANELS = (
    *("Arguments", "Options", "The fleet", "Scaling", "Serving", "Failover", "Health"),
    *("The torch and vllm engines", "The torch engine", "The vllm engine", "The sim engine"),
)
OWN_PANEL = "Options"
UNBROKEN = "\u00a0"  # a space where no line ends
UNITS = {"s": "SECONDS", "ms": "MILLISECONDS"}
KINDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}

Entry = tuple[str, str]  # what is written, and what it means
Panels = Mapping[str, Sequence[Entry]]


def page(usage: str, text: str, panels: Panels, end: str, width: int) -> list[str]:
    """Lines; titles end with a colon."""
    width = max(WIDTH_MIN, min(width, WIDTH_MAX))
    left = min(LEFT_MAX, max(len(what) for entries in panels.values() for what, _ in entries) + 4)
    lines = [f"Usage: {usage}", ""]
    for paragraph in text.split("\n\n"):
        lines += [*_paragraph(paragraph, width), ""]
    for title, entries in panels.items():
        lines += [f"{title}:", *(line for entry in entries for line in _entry(*entry, left, width)), ""]
    return [*lines, *textwrap.wrap(end, width), ""] if end else lines


def _paragraph(text: str, width: int) -> list[str]:
    """Of a list each entry has its own lines."""
    if not text.startswith("- "):
        return textwrap.wrap(text, width, break_on_hyphens=False)
    entries = (" ".join(line.split()) for line in text.removeprefix("- ").split("\n- "))
    return [
        line
        for one in entries
        for line in textwrap.wrap(
            one, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
        )
    ]


def _entry(what: str, meaning: str, left: int, width: int) -> list[str]:
    wrapped = textwrap.wrap(meaning, width - left, break_on_hyphens=False) or [""]
    rows = [row.replace(UNBROKEN, " ") for row in wrapped]
    first = f"  {what}".ljust(left)
    if len(what) + 4 > left:
        return [first, *(" " * left + row for row in rows)]
    return [first + rows[0], *(" " * left + row for row in rows[1:])]


def panels_of(options: Options) -> dict[str, list[Entry]]:
    """Arguments and options by their panel, in the order they are declared."""
    places = [(one.name, one.sentence) for one in options.values() if one.extra.get("positional")]
    panels: dict[str, list[Entry]] = {PANELS[0]: places} if places else {}
    panels[OWN_PANEL] = []
    for one in options.values():
        if not one.extra.get("hidden") and not one.extra.get("positional"):
            panels.setdefault(one.extra.get("panel", OWN_PANEL), []).append((_written(one), _meaning(one)))
    panels[OWN_PANEL].append(("--help, -h", "Show this."))
    return dict(sorted(panels.items(), key=lambda panel: PANELS.index(panel[0])))


def _written(one: Setting) -> str:
    flags = ", ".join(filter(None, (*one.flag.split("/"), one.extra.get("short"))))
    if kind_of(one) is bool:
        return flags
    choices = "|".join(one.extra.get("choices", ()))
    rest = ", -- TEXT …" if one.extra.get("rest") else ""
    return f"{flags} {choices or UNITS.get(one.unit) or one.unit.upper() or KINDS[kind_of(one)]}{rest}"


def _meaning(one: Setting) -> str:
    least, most, over = (one.extra.get(key) for key in ("min", "max", "over"))
    bounds = f"{least:g} to {most:g}" if least is not None and most is not None else ""
    if not bounds and least:
        bounds = f"{least:g} or more"
    facts = [bounds or (f"over {over:g}" if over else ""), _default(one)]
    told = f"[{', '.join(filter(None, facts))}]".replace(" ", UNBROKEN)
    return f"{one.sentence} {told}" if any(facts) else one.sentence


def _default(one: Setting) -> str:
    value: Any = one.default
    if value in (None, "", ()) or takes_many(one) or "default" in one.sentence.lower():
        return ""
    if isinstance(value, bool):
        on, _, off = one.flag.removeprefix("--").partition("/--")
        return f"default {on if value else off}" if off else ""
    return f"default {value:g}" if isinstance(value, float) else f"default {value}"
