"""Turns of `python -m bench.engine` and what is told of them: plain data in, figures and a table out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from tests.rigs.engines.decoded import Decode

FAST, EXACT, TRANSFORMERS = "fast", "exact", "transformers"
# Prompts of several streams spread from this share of `prompt_tokens` to as much above it: real ones are not alike.
SPREAD = 0.5


# Decodes prompts greedily, so many new tokens each, whatever ends a text.
Way = Callable[[list[list[int]], int], Decode]


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Return the same ones always. One stream's has `tokens`; those of several spread around it, shortest first."""
    rng = Random(count)
    shares = [1 + SPREAD * (2 * place / (count - 1) - 1) if count > 1 else 1.0 for place in range(count)]
    return [[rng.randrange(vocabulary) for _ in range(round(tokens * share))] for share in shares]


def row(count: int, rounds: Sequence[Mapping[str, Decode]]) -> dict[str, Any]:
    """Medians over the rounds; a ratio is the median of the rounds' own."""
    found: dict[str, Any] = {"streams": count}
    for name in rounds[0]:
        found[f"{name}_tokens_per_s"] = _median(made[name].per_s for made in rounds)
        found[f"{name}_cpu_ms_per_token"] = _median(made[name].cpu_ms for made in rounds)
    found["exact_cost"] = _median(made[FAST].per_s / made[EXACT].per_s for made in rounds)
    if TRANSFORMERS in rounds[0]:
        pairs = [(made[FAST], made[TRANSFORMERS]) for made in rounds]
        found["ratio"] = _median(ours.per_s / theirs.per_s for ours, theirs in pairs)
        found["ratio_min"] = round(min(ours.per_s / theirs.per_s for ours, theirs in pairs), 3)
        found["cpu_ratio"] = _median(theirs.cpu_ms / ours.cpu_ms for ours, theirs in pairs)
        found["same_text_share"] = _median(_same_share(ours, theirs) for ours, theirs in pairs)
    return found


def _median(figures: Iterable[float]) -> float:
    return round(statistics.median(figures), 3)


def _same_share(one: Decode, other: Decode) -> float:
    """Of the streams: those of the same words from end to end. A near tie may part the others (facts 4e)."""
    return sum(a == b for a, b in zip(one.said, other.said, strict=True)) / len(one.said)


COLUMNS = (
    ("streams", "streams", "{:d}"),
    ("fast_tokens_per_s", "fast tok/s", "{:.1f}"),
    ("transformers_tokens_per_s", "transformers tok/s", "{:.1f}"),
    ("ratio", "ratio", "{:.2f}x"),
    ("ratio_min", "worst round", "{:.2f}x"),
    ("cpu_ratio", "cpu ratio", "{:.2f}x"),
    ("exact_tokens_per_s", "exact tok/s", "{:.1f}"),
    ("exact_cost", "exact cost", "{:.2f}x"),
)


def table(result: Mapping[str, Any]) -> str:
    """For people: what was asked, and a line for each number of streams."""
    about = "{model}, {threads} threads, {tokens} tokens after prompts of {prompt_tokens}, {rounds} rounds"
    shown = [column for column in COLUMNS if column[0] in result["rows"][0]]
    lines = [[title for _, title, _ in shown]]
    lines += [[form.format(found[name]) for name, _, form in shown] for found in result["rows"]]
    widths = [max(len(line[at]) for line in lines) for at in range(len(shown))]
    drawn = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([about.format_map(result), *drawn]) + "\n"
