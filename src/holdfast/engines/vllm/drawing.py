"""Draws inside vLLM: rows of logits become rows whose largest value is the token, and vLLM takes the largest.

The order and the noise are the torch engine's (torch/sampling.py): bans and bias, penalties, temperature, truncation,
noise from (seed, position, token id). Always true: what a row becomes is a function of its logits, its request and its
text so far, so a stream that was resumed anywhere draws as the unbroken one; a row that no draw asked for (a prompt's
chunk) changes nothing; rows that take the likeliest token of the model's own logits are not here at all.

vLLM hands over the list in which it keeps a request's new tokens, and appends to it. In asynchronous scheduling the
newest of them is a placeholder until just before the draw, so tokens are read then and never sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from holdfast.core.requests import Sampling
from holdfast.engines.sampling.noise import gumbel, row_keys, seed_key, token_words
from holdfast.engines.sampling.penalties import Kept, Nudges, Penalties, nudges, penalties
from holdfast.engines.sampling.settings import has_penalties, is_greedy
from holdfast.engines.sampling.truncation import Truncation, truncation


class Asked(msgspec.Struct, frozen=True):
    """What a draw needs to know of a request, beside its tokens."""

    sampling: Sampling
    prompt_len: int
    stops: frozenset[int]


class Row:
    """A request in vLLM's batch that is drawn for. `made` is vLLM's own list, which grows."""

    __slots__ = ("_given", "_made", "counted", "prompt_len", "sampling", "stop_from", "stops")

    def __init__(self, asked: Asked, given: Sequence[int], made: list[int]) -> None:
        self.sampling = asked.sampling
        self.prompt_len = asked.prompt_len
        self.stops = asked.stops
        self.stop_from = asked.prompt_len + asked.sampling.min_tokens
        self._given = given  # the prompt, and what an earlier engine generated
        self._made = made
        self.counted = 0  # how many of those its penalties have taken up

    @property
    def tokens(self) -> list[int]:
        return [*self._given, *self._made]

    @property
    def position(self) -> int:
        """Of the token that is drawn next."""
        return len(self._given) + len(self._made)

    def uncounted(self) -> list[int]:
        """What was made since it was last asked."""
        new = self._made[self.counted :]
        self.counted += len(new)
        return new


@dataclass(frozen=True, slots=True)
class _Batch:
    """The settings of the rows as tensors; all places but `places` are among those rows."""

    rows: list[Row]
    places: torch.Tensor | None  # in vLLM's batch; None: they are all of it, in order
    random: torch.Tensor | None  # rows that are drawn and not the likeliest; None: all
    seeds: torch.Tensor  # of the drawn, mixed
    temperatures: torch.Tensor  # of the drawn, [drawn, 1]
    truncation: Truncation | None  # by place among the drawn
    nudges: Nudges | None
    penalties: Penalties | None


class Drawing:
    """The rows of one engine's batch that are drawn for. One thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words = torch.empty(0, dtype=torch.int32, device=device)
        self._rows: dict[int, Row] = {}
        self._batch: _Batch | None = None
        self._size = 0

    def __repr__(self) -> str:
        return f"<draws for {len(self._rows)} rows>"

    def arrange(self, rows: Mapping[int, Row]) -> None:
        """Who is where in the batch from now on. A row that was here goes on with what it has counted."""
        self._rows = dict(sorted(rows.items()))
        self._size = -1

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the whole batch, float32 [batch, vocabulary], some rows changed in place."""
        if not self._rows:
            self._batch = None
            return logits
        if self._batch is None or self._size != logits.shape[0]:
            self._batch, self._size = self._arranged(logits), logits.shape[0]
        batch = self._batch
        part = logits if batch.places is None else logits.index_select(0, batch.places)
        self._shape_(part, batch)
        return part if batch.places is None else logits.index_copy_(0, batch.places, part)

    def _shape_(self, part: torch.Tensor, batch: _Batch) -> None:
        positions = torch.tensor([row.position for row in batch.rows], device=self._device)
        if batch.nudges is not None:
            batch.nudges.apply_(part, positions)
        if batch.penalties is not None:
            _count_(batch.penalties, batch.rows, self._device)
            batch.penalties.apply_(part)
        if not batch.seeds.shape[0]:
            return
        drawn = part
        if batch.random is not None:
            drawn, positions = part.index_select(0, batch.random), positions.index_select(0, batch.random)
        drawn /= batch.temperatures
        if batch.truncation is not None:
            batch.truncation.apply_(drawn)
        drawn += gumbel(row_keys(batch.seeds, positions), self._words)
        if batch.random is not None:
            part.index_copy_(0, batch.random, drawn)

    def _arranged(self, logits: torch.Tensor) -> _Batch:
        device, vocabulary = self._device, logits.shape[1]
        if self._words.shape[0] != vocabulary:
            self._words = token_words(vocabulary, device)
        rows, places = list(self._rows.values()), list(self._rows)
        settings = [row.sampling for row in rows]
        random = [place for place, each in enumerate(settings) if not is_greedy(each)]
        drawn = [settings[place] for place in random]
        whole = len(places) == logits.shape[0]
        kept = _kept(self._batch, rows)
        for place, row in enumerate(rows):
            if place not in kept and has_penalties(row.sampling):
                row.uncounted()  # they are in its text, which is counted whole
        return _Batch(
            rows,
            places=None if whole else torch.tensor(places, device=device),
            random=None if len(random) == len(rows) else torch.tensor(random, dtype=torch.int64, device=device),
            seeds=torch.tensor([seed_key(each.seed) for each in drawn], dtype=torch.int64, device=device),
            temperatures=torch.tensor(
                [each.temperature for each in drawn], dtype=torch.float32, device=device
            ).unsqueeze(1),
            truncation=truncation(drawn, vocabulary, device),
            nudges=nudges(rows, vocabulary, device),
            penalties=penalties(rows, kept, vocabulary, device),
        )


def _penalised(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if has_penalties(row.sampling)]


def _kept(before: _Batch | None, rows: Sequence[Row]) -> dict[int, Kept]:
    """By place among the rows, those whose counts the batch before has, up to the tokens they have counted."""
    if before is None or before.penalties is None:
        return {}
    places = {id(row): at for at, row in enumerate(_penalised(before.rows))}
    return {
        place: Kept(before.penalties, places[id(row)]) for place, row in enumerate(rows) if id(row) in places
    }


def _count_(made: Penalties, rows: Sequence[Row], device: torch.device) -> None:
    """Take up what was made since the last draw."""
    new = [(at, token) for at, row in enumerate(_penalised(rows)) for token in row.uncounted()]
    if new:
        places, tokens = torch.tensor(new, device=device).unbind(1)
        ones = torch.ones(len(new), dtype=torch.float32, device=device)
        made.counts.index_put_((places, tokens), ones, accumulate=True)
