"""`holdfast bench engine`: how fast the torch engine decodes, alone, and beside `transformers` on the same weights.

It measures the engine alone, in this process: scheduler, forward pass and sampling over weights and KV in plain memory;
no vault, no worker, no frontend. Only decode counts: from every stream's first token to its last. Always true: all ways
to run get the same prompts, the same number of new tokens and of threads, fp32, and take turns round by round, each
round in another order; the ratio is the median of the rounds' ratios, because on a shared machine a minute's speed is
not the next one's, and turns a second apart are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import UserError

if TYPE_CHECKING:
    from holdfast.engines.torch.files.checkpoint import Checkpoint

FAST, EXACT, TRANSFORMERS = "fast", "exact", "transformers"
COMPARED = ("", TRANSFORMERS)
# Prompts of several streams spread from this share of `prompt_tokens` to as much above it: real ones are not alike.
SPREAD = 0.5
# Before the first round, uncounted: memory is touched, threads start, kernels are chosen.
WARM_TOKENS = 4
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What is measured; the defaults are those of the published figure."""

    cache_dir: Path  # of fetched models
    model: str = "default"  # default, tiny, or a path
    streams: tuple[int, ...] = (1, 8)  # decoded at once, one row of results each
    tokens: int = 128  # new ones per stream
    prompt_tokens: int = 64  # of a stream's prompt, on average
    compare: str = ""  # "transformers": its `generate` takes turns with ours
    repeats: int = 5  # rounds
    threads: int = 0  # of a product; 0: the engine's own default, all cores but one

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1:
            raise UserError(f"--streams are whole numbers over 0 with commas between, like 1,8; got {self.streams}")
        if self.compare not in COMPARED:
            raise UserError(f"--compare can be {TRANSFORMERS}, or be left out; got {self.compare}")
        for name, least in (("tokens", 2), ("prompt_tokens", 2), ("repeats", 1), ("threads", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.replace('_', '-')} must be {least} or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Decode:
    """One turn: what each stream said, and the time from the first token of all to the last of all."""

    said: list[list[int]]
    wall_s: float
    cpu_s: float  # of all threads

    @property
    def tokens(self) -> int:
        """That were decoded in this time: the first of each stream is the prompt's."""
        return sum(len(one) - 1 for one in self.said)

    @property
    def per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def cpu_ms(self) -> float:
        """Per token."""
        return self.cpu_s * 1000 / self.tokens


# Decodes prompts greedily, so many new tokens each, whatever ends a text.
Way = Callable[[list[list[int]], int], Decode]


def run(bench: EngineBench, tell: Tell) -> dict[str, Any]:
    """A row for each number of streams, under `rows`."""
    from holdfast.bench.engine_speed_ours import OurEngine, open_model
    from holdfast.engines.torch.stepper import threads_for, use_threads

    threads = threads_for(bench.threads)
    use_threads(threads)
    checkpoint = open_model(bench.model, bench.cache_dir, tell)
    _check_lengths(bench, checkpoint)
    theirs = _theirs(checkpoint, bench, tell)  # first: what is missing is said before anything is loaded
    ours = OurEngine(checkpoint, tell)
    ways: dict[str, Way] = {FAST: ours.fast, EXACT: ours.exact} | theirs
    rows = [_row(ways, count, bench, checkpoint.config.vocabulary, tell) for count in bench.streams]
    about = {"model": bench.model, "threads": threads, "tokens": bench.tokens}
    return about | {"prompt_tokens": bench.prompt_tokens, "rounds": bench.repeats, "rows": rows}


def _check_lengths(bench: EngineBench, checkpoint: Checkpoint) -> None:
    longest = int(bench.prompt_tokens * (1 + SPREAD)) + bench.tokens
    most = checkpoint.config.context_tokens_max
    if longest > most:
        raise UserError(f"texts of {longest} tokens, and the model takes {most}: lower --prompt-tokens or --tokens")


def _theirs(checkpoint: Checkpoint, bench: EngineBench, tell: Tell) -> dict[str, Way]:
    if not bench.compare:
        return {}
    from holdfast.bench.engine_speed_theirs import TheirModel

    return {TRANSFORMERS: TheirModel(checkpoint, bench.model, tell).decode}


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """The same ones always. One stream's has `tokens`; those of several spread around it, shortest first."""
    rng = Random(count)
    shares = [1 + SPREAD * (2 * place / (count - 1) - 1) if count > 1 else 1.0 for place in range(count)]
    return [[rng.randrange(vocabulary) for _ in range(round(tokens * share))] for share in shares]


def _row(ways: Mapping[str, Way], count: int, bench: EngineBench, vocabulary: int, tell: Tell) -> dict[str, Any]:
    asked = prompts(count, bench.prompt_tokens, vocabulary)
    for name, way in ways.items():
        tell(f"{count} streams: warming up {name}")
        way(asked, WARM_TOKENS)
    rounds: list[dict[str, Decode]] = []
    names = list(ways)
    for number in range(bench.repeats):
        first = number % len(names)
        made = {}
        for name in names[first:] + names[:first]:
            made[name] = ways[name](asked, bench.tokens)
            tell(f"{count} streams, round {number + 1} of {bench.repeats}: {name} {made[name].per_s:.1f} tokens/s")
        rounds.append(made)
    return row(count, rounds)


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
