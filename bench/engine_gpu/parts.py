"""What the parts of the engine's bench on a GPU share: a command whose options are a dataclass's fields, and a file
that has what was found so far.

Of the standard library and our errors alone, because vLLM's half runs where our packages may not be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.engine_gpu.words import LONG, SHORT, Case, Row, decode_rate
from holdfast.core.errors import UserError

Wishes = TypeVar("Wishes")


class Keep:
    """Hears a part's row as it grows, and writes it to DIR/PART.json each time: a lent GPU may be gone any minute."""

    def __init__(self, out: Path, part: str) -> None:
        self._out, self._part = out, part
        self._row: Row = {}

    def __call__(self, row: Row) -> None:
        self._row |= row
        (self._out / f"{self._part}.json").write_text(json.dumps({self._part: self._row}, indent=1) + "\n")

    def log(self, text: str) -> None:
        (self._out / f"{self._part}-logs.txt").write_text(text)


def keep_case(head: Row, case: Case, took_s: Mapping[int, Sequence[float]], keep: Keep) -> None:
    """A case's speed goes into the row: of its runs, by their tokens, the quicker of each count."""
    rate = decode_rate(case.batch, min(took_s[SHORT]), min(took_s[LONG]))
    shown = {str(tokens): [round(one, 3) for one in took_s[tokens]] for tokens in (SHORT, LONG)}
    head["cases"][case.name] = rate | {"took_s": shown}
    print(f"{case.name}: {json.dumps(head['cases'][case.name])}", file=sys.stderr, flush=True)
    keep(head)


def part_main(part: str, wishes: type[Wishes], run: Callable[[Wishes, Keep], Row], argv: list[str]) -> int:
    """Run it with what was asked for; 1 if it failed or missed its bound, and then why is in its file."""
    parser = argparse.ArgumentParser(prog=part)
    parser.add_argument("--out", type=Path, required=True, help=f"a folder: {part}.json goes there")
    for field in dataclasses.fields(wishes):  # type: ignore[arg-type]
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    asked: dict[str, Any] = vars(parser.parse_args(argv))
    out: Path = asked.pop("out")
    out.mkdir(parents=True, exist_ok=True)
    keep = Keep(out, part)
    try:
        row = run(wishes(**asked), keep)
    except (TimeoutError, UserError, OSError) as error:
        keep({"failed": str(error)[-6000:], "met": False, "bound": "it runs"})
        print(f"{part} failed: {error}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps({key: value for key, value in row.items() if key != "each"}), flush=True)
    return 0 if row.get("met", True) else 1
