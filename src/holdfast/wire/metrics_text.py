"""Several processes' metrics on one page: every sample says whose it is, every family stands there once. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def merged(pages: Mapping[str, bytes], label: str) -> bytes:
    """Pages by the name that `label` has on each of their samples."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # its comments, its samples
    for name, page in pages.items():
        pair = '{}="{}"'.format(label, name.replace("\\", r"\\").replace('"', r"\""))
        family: tuple[list[str], list[str]] = ([], [])
        for line in page.decode().splitlines():
            if line.startswith("# "):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in family[0]:
                    family[0].append(line)
            elif line:
                family[1].append(_labelled(line, pair))
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, pair: str) -> str:
    """A name ends at its labels or, where it has none, at its value."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{pair},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{pair}}} {value}"
