"""`python -m bench.engine`: how fast the torch engine decodes, alone, and beside `transformers` on the same weights.

It measures the engine alone, in this process: scheduler, forward pass and sampling over weights and KV in plain memory;
no vault, no worker, no frontend. Only decode counts: from every stream's first token to its last. Always true: all ways
to run get the same prompts, the same number of new tokens and of threads, fp32, and take turns round by round, each
round in another order; the ratio is the median of the rounds' ratios, because on a shared machine a minute's speed is
not the next one's, and turns a second apart are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engine.figures import EXACT, FAST, SPREAD, TRANSFORMERS, Way, prompts, row
from holdfast.core.errors import UserError
from tests.rigs.engines.decoded import Decode, Tell

if TYPE_CHECKING:
    from holdfast.engines.torch.files.checkpoint import Checkpoint

COMPARED = ("", TRANSFORMERS)
# Before the first round, uncounted: memory is touched, threads start, kernels are chosen.
WARM_TOKENS = 4


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


def run(bench: EngineBench, tell: Tell) -> dict[str, Any]:
    """A row for each number of streams, under `rows`."""
    from bench.engine.ours import OurEngine, open_model
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
    from tests.rigs.engines.transformers_model import TheirModel

    return {TRANSFORMERS: TheirModel(checkpoint, bench.model, tell).decode}


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
