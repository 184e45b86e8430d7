"""What moves single tokens' logits before a draw: bias, bans and penalties, each for only the rows that have them.

Always true: a row's state is a function of its prompt, its generated tokens and its settings, so it is the same
whether it was carried along with the stream or made anew from a resumed request; only the first `prompt_len` tokens
are prompt. Nothing waits for the device: the tokens of a step are counted where they were drawn. As in vLLM: bans and
bias come first; the repetition penalty is over prompt and generated tokens, the frequency and presence penalties over
the generated ones; a positive logit is divided by the repetition penalty, any other multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.core.requests import Sampling
from holdfast.engines.sampling.settings import has_penalties


class Text(Protocol):
    """What is drawn for, as far as it moves logits."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def prompt_len(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt, and what has been generated."""

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end it."""

    @property
    def stop_from(self) -> int:
        """The first position at which one of them may be drawn."""


@dataclass(frozen=True, slots=True)
class Nudges:
    """Single logits to change: one entry per (row, token id), no pair twice."""

    rows: torch.Tensor
    ids: torch.Tensor
    bias: torch.Tensor
    banned_until: torch.Tensor  # the first position at which the token may be drawn

    def apply_(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        at = (self.rows, self.ids)
        banned = positions.index_select(0, self.rows) < self.banned_until
        logits.index_put_(at, (logits[at] + self.bias).masked_fill(banned, -math.inf))


def nudges(texts: Sequence[Text], vocabulary: int, device: torch.device) -> Nudges | None:
    """None: no row has any."""
    entries: dict[tuple[int, int], tuple[float, int]] = {}
    for row, text in enumerate(texts):
        sampling = text.sampling
        for token, bias in (sampling.logit_bias or {}).items():
            entries[row, token] = (bias, 0)
        if sampling.min_tokens > 0:
            for token in text.stops:
                if 0 <= token < vocabulary:  # a stop id that no token has is harmless
                    entries[row, token] = (entries.get((row, token), (0.0, 0))[0], text.stop_from)
    if not entries:
        return None
    places, values = list(entries), list(entries.values())
    return Nudges(
        rows=torch.tensor([row for row, _ in places], device=device),
        ids=torch.tensor([token for _, token in places], device=device),
        bias=torch.tensor([bias for bias, _ in values], dtype=torch.float32, device=device),
        banned_until=torch.tensor([until for _, until in values], device=device),
    )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Counts and settings of the rows that have penalties; `rows` are their places in the batch, ascending."""

    rows: torch.Tensor
    prompt: torch.Tensor  # bool [penalised, vocabulary]: in the prompt
    counts: torch.Tensor  # float32 [penalised, vocabulary]: how often generated
    repetition: torch.Tensor  # [penalised, 1], as the two below
    frequency: torch.Tensor
    presence: torch.Tensor

    def apply_(self, logits: torch.Tensor) -> None:
        part = logits.index_select(0, self.rows)
        made = self.counts > 0
        scaled = torch.where(part > 0, part / self.repetition, part * self.repetition)
        part = torch.where(self.prompt | made, scaled, part)
        part -= self.frequency * self.counts
        part -= self.presence * made
        logits.index_copy_(0, self.rows, part)

    def count_(self, tokens: torch.Tensor) -> None:
        """Take up what the batch has drawn."""
        drawn = tokens.index_select(0, self.rows).unsqueeze(1)
        self.counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32))


@dataclass(frozen=True, slots=True)
class Kept:
    """A stream's state in an earlier batch: where, and whether it has counted all tokens there are."""

    penalties: Penalties
    at: int  # its place among the penalised rows


def penalties(
    texts: Sequence[Text], kept: dict[int, Kept], vocabulary: int, device: torch.device
) -> Penalties | None:
    """`kept` has, by place in `texts`, those whose state can be carried over from the batch before: it has counted
    tokens too that are drawn but not yet known here. All others are made anew from their text."""
    rows = [row for row, text in enumerate(texts) if has_penalties(text.sampling)]
    if not rows:
        return None
    prompt = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
    counts = torch.zeros(len(rows), vocabulary, dtype=torch.float32, device=device)
    for at, row in enumerate(rows):
        old = kept.get(row)
        if old is not None:
            prompt[at].copy_(old.penalties.prompt[old.at])
            counts[at].copy_(old.penalties.counts[old.at])
            continue
        tokens, prompt_len = texts[row].tokens, texts[row].prompt_len
        prompt[at].index_fill_(0, torch.tensor(tokens[:prompt_len], device=device), True)
        made = torch.tensor(tokens[prompt_len:], dtype=torch.int64, device=device)
        counts[at].scatter_add_(0, made, torch.ones_like(made, dtype=torch.float32))

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    settings = [texts[row].sampling for row in rows]
    return Penalties(
        rows=torch.tensor(rows, device=device),
        prompt=prompt,
        counts=counts,
        repetition=column([each.repetition_penalty for each in settings]),
        frequency=column([each.frequency_penalty for each in settings]),
        presence=column([each.presence_penalty for each in settings]),
    )
