"""Draws tokens inside vLLM: changes the logits so that the drawn token has the largest value, which vLLM then takes.

The order and the noise are the torch engine's (torch/sampling.py): bans and bias, penalties, temperature, truncation,
noise from (seed, position, token id).

Always true: a changed row depends only on its logits, its request and its text so far, so a resumed stream draws like
the unbroken one. A row that draws nothing (a prompt's chunk) changes no state. Rows that take the likeliest token of
the unchanged logits are not handled here.

vLLM passes the list in which it keeps a request's new tokens, and appends to it. With asynchronous scheduling its
newest entry is a placeholder until just before the draw, so tokens are read then and never earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from holdfast.core.requests import Sampling
from holdfast.engines.sampling import (
    CarriedCounts,
    Penalties,
    TokenRules,
    Truncation,
    gumbel,
    penalties,
    row_keys,
    seed_key,
    token_hashes,
    token_rules,
    truncation,
)


class Asked(msgspec.Struct, frozen=True):
    """The fields of a request that a draw needs, besides its tokens."""

    sampling: Sampling
    prompt_len: int
    stops: frozenset[int]


class Row:
    """A request in vLLM's batch whose tokens are drawn here. `made` is vLLM's own list, which grows."""

    __slots__ = ("_given", "_made", "counted", "prompt_len", "sampling", "stop_from", "stops")

    def __init__(self, asked: Asked, given: Sequence[int], made: list[int]) -> None:
        self.sampling = asked.sampling
        self.prompt_len = asked.prompt_len
        self.stops = asked.stops
        self.stop_from = asked.prompt_len + asked.sampling.min_tokens
        self._given = given  # the prompt, and the tokens that an earlier engine generated
        self._made = made
        self.counted = 0  # how many of vLLM's new tokens its penalties have counted

    @property
    def tokens(self) -> list[int]:
        return [*self._given, *self._made]

    @property
    def position(self) -> int:
        """Return the position of the next token."""
        return len(self._given) + len(self._made)

    def uncounted(self) -> list[int]:
        """Return the tokens made since the last call."""
        new = self._made[self.counted :]
        self.counted += len(new)
        return new


@dataclass(frozen=True, slots=True)
class _Batch:
    """The settings of the rows as tensors. `places` are indexes into vLLM's batch; all others are indexes among these
    rows."""

    rows: list[Row]
    places: torch.Tensor | None  # in vLLM's batch; None: they are all of it, in order
    random: torch.Tensor | None  # rows that are drawn and not the likeliest; None: all
    seeds: torch.Tensor  # of the drawn, mixed
    temperatures: torch.Tensor  # of the drawn, [drawn, 1]
    truncation: Truncation | None  # by place among the drawn
    token_rules: TokenRules | None
    penalties: Penalties | None


class Drawing:
    """The rows of one engine's batch whose tokens are drawn here; not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words = torch.empty(0, dtype=torch.int32, device=device)
        self._rows: dict[int, Row] = {}
        self._batch: _Batch | None = None
        self._size = 0

    def __repr__(self) -> str:
        return f"<draws for {len(self._rows)} rows>"

    def arrange(self, rows: Mapping[int, Row]) -> None:
        """Set the batch's requests, by row. A request from the previous batch keeps its counts."""
        self._rows = dict(sorted(rows.items()))
        self._size = -1

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole batch, float32 [batch, vocabulary], some rows changed in place."""
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
        if batch.token_rules is not None:
            batch.token_rules.apply_(part, positions)
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
            self._words = token_hashes(vocabulary, device)
        rows, places = list(self._rows.values()), list(self._rows)
        settings = [row.sampling for row in rows]
        random = [place for place, each in enumerate(settings) if not each.is_greedy]
        drawn = [settings[place] for place in random]
        whole = len(places) == logits.shape[0]
        kept = _kept(self._batch, rows)
        for place, row in enumerate(rows):
            if place not in kept and row.sampling.has_penalties:
                row.uncounted()  # skip these: its whole text is counted below
        return _Batch(
            rows,
            places=None if whole else torch.tensor(places, device=device),
            random=None if len(random) == len(rows) else torch.tensor(random, dtype=torch.int64, device=device),
            seeds=torch.tensor([seed_key(each.seed) for each in drawn], dtype=torch.int64, device=device),
            temperatures=torch.tensor(
                [each.temperature for each in drawn], dtype=torch.float32, device=device
            ).unsqueeze(1),
            truncation=truncation(drawn, vocabulary, device),
            token_rules=token_rules(rows, vocabulary, device),
            penalties=penalties(rows, kept, vocabulary, device),
        )


def _penalised(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.sampling.has_penalties]


def _kept(before: _Batch | None, rows: Sequence[Row]) -> dict[int, CarriedCounts]:
    """Return the counts that the previous batch has, by index among the rows."""
    if before is None or before.penalties is None:
        return {}
    places = {id(row): at for at, row in enumerate(_penalised(before.rows))}
    return {
        place: CarriedCounts(before.penalties, places[id(row)]) for place, row in enumerate(rows) if id(row) in places
    }


def _count_(made: Penalties, rows: Sequence[Row], device: torch.device) -> None:
    """Count the tokens made since the last draw."""
    new = [(at, token) for at, row in enumerate(_penalised(rows)) for token in row.uncounted()]
    if new:
        places, tokens = torch.tensor(new, device=device).unbind(1)
        ones = torch.ones(len(new), dtype=torch.float32, device=device)
        made.counts.index_put_((places, tokens), ones, accumulate=True)
