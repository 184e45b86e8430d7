"""Draws a token for each row of a step's logits, by the row's own settings and the rules of `engines.sampling`.

Rows below the smallest temperature take the likeliest token, the others are drawn. Of equal values the lowest id wins.
Logprobs are the model's own, before any rule (vLLM's default, `raw_logprobs`).

Always true:
- A row's token depends only on its logits, settings and text, bit for bit: not on other rows, its index or the batch
  size.
- Nothing waits for the device, so a step can be captured in a graph, and the next one queued before its tokens are
  known.
- Rows cost only what they ask for: no sort for plain rows, no noise for greedy ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from holdfast.core.requests import Sampling, TokenLogprobs
from holdfast.engines.paged.sequences import PagedStream, Segment
from holdfast.engines.sampling import (
    CarriedCounts,
    Penalties,
    TokenRules,
    Truncation,
    gumbel,
    penalties,
    row_keys,
    seed_key,
    token_rules,
    truncation,
)
from holdfast.engines.torch.model.batch import on_host


@dataclass(slots=True)
class SamplingRows:
    """The settings of a batch's rows as tensors. Between steps of the same streams only `advance` changes them."""

    streams: list[PagedStream]
    seeds: torch.Tensor  # mixed
    positions: torch.Tensor  # of the token to draw
    temperatures: torch.Tensor  # [rows, 1]; 1 where the likeliest is taken
    words: torch.Tensor  # of the noise, by token id
    greedy: torch.Tensor | None = None  # places of rows that take the likeliest; None: none
    random: torch.Tensor | None = None  # places of rows that are drawn; None: all that `greedy` does not name
    likeliest: torch.Tensor | None = None  # bool [rows, 1] instead of places, where the rows are a graph's
    truncation: Truncation | None = None  # by place among the drawn rows
    token_rules: TokenRules | None = None
    penalties: Penalties | None = None
    logprob_rows: torch.Tensor | None = None  # places of rows that ask for logprobs
    logprob_tops: list[int] = field(default_factory=list)  # how many alternatives each of these asks for
    logprob_streams: list[int] = field(default_factory=list)  # and their numbers
    next_positions: list[int] = field(default_factory=list)  # `positions` as known here, when the rows were made
    steps: int = 0  # taken since

    @property
    def due(self) -> list[int]:
        """Return `positions` as known on the host, including steps that a graph has made since."""
        return [position + self.steps for position in self.next_positions]

    def advance(self, tokens: torch.Tensor) -> None:
        """Count the drawn tokens and advance the positions, on the device, in place."""
        self.positions += 1
        if self.penalties is not None:
            self.penalties.count_(tokens)
        self.steps += 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens that a step drew, and the logprobs of the rows that ask for them, in row order."""

    tokens: torch.Tensor
    chosen: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def on_host(self) -> Drawn:
        """Start to copy the logprobs to the host: a later copy would also wait for the next step."""
        asked = (self.chosen, self.top_ids, self.top_logprobs)
        return Drawn(self.tokens, *(on_host(each) if each is not None else None for each in asked))


def draw(logits: torch.Tensor, rows: SamplingRows) -> Drawn:
    """Draw one token per row of `logits` [rows, vocabulary], which stays unchanged."""
    if logits.is_cuda and not (rows.truncation or rows.token_rules or rows.penalties or rows.logprob_tops):
        return Drawn(_tokens(logits, rows))  # the kernel takes them as they are
    raw = logits.float()
    shaped = raw
    if rows.token_rules is not None or rows.penalties is not None:
        shaped = raw.clone()
        if rows.token_rules is not None:
            rows.token_rules.apply_(shaped, rows.positions)
        if rows.penalties is not None:
            rows.penalties.apply_(shaped)
    tokens = _tokens(shaped, rows)
    return _with_logprobs(raw, tokens, rows) if rows.logprob_rows is not None else Drawn(tokens)


def _tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if logits.is_cuda and (rows.truncation is None or rows.greedy is None):
        from holdfast.engines.torch.gpu.kernels_sampling import sample  # loads triton

        temperatures = rows.temperatures
        if rows.truncation is not None:  # of what is divided already
            logits, temperatures = logits / temperatures, torch.ones_like(temperatures)
            rows.truncation.apply_(logits)
        return sample(logits, rows.seeds, rows.positions, temperatures, rows.words, _likeliest(rows))
    if rows.greedy is None:
        return _gumbel_max(logits, row_keys(rows.seeds, rows.positions), rows.temperatures, rows)
    if rows.random is None:
        return _largest(logits)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    tokens.index_copy_(0, rows.greedy, _largest(logits.index_select(0, rows.greedy)))
    keys = row_keys(rows.seeds, rows.positions).index_select(0, rows.random)
    temperatures = rows.temperatures.index_select(0, rows.random)
    drawn = _gumbel_max(logits.index_select(0, rows.random), keys, temperatures, rows)
    return tokens.index_copy_(0, rows.random, drawn)


def _likeliest(rows: SamplingRows) -> torch.Tensor | None:
    """Return the rows that take the likeliest token, as a bool [rows, 1]; None: none. (Their temperature is 1.)"""
    if rows.likeliest is not None or rows.greedy is None:
        return rows.likeliest
    chosen = torch.zeros(len(rows.streams), 1, dtype=torch.bool, device=rows.seeds.device)
    return chosen.index_fill_(0, rows.greedy, True)


def _gumbel_max(
    logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, rows: SamplingRows
) -> torch.Tensor:
    scaled = logits / temperatures
    if rows.truncation is not None:
        rows.truncation.apply_(scaled)
    scaled += gumbel(keys, rows.words)
    if rows.likeliest is not None:
        scaled = torch.where(rows.likeliest, logits, scaled)
    return _largest(scaled)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest; on CPU `max` finds it in a third of `argmax`'s time."""
    return values.max(-1).indices


def _with_logprobs(raw: torch.Tensor, tokens: torch.Tensor, rows: SamplingRows) -> Drawn:
    assert rows.logprob_rows is not None
    logprobs = raw.index_select(0, rows.logprob_rows).log_softmax(-1)
    chosen = logprobs.gather(1, tokens.index_select(0, rows.logprob_rows).unsqueeze(1)).squeeze(1)
    top = logprobs.topk(min(max(rows.logprob_tops), logprobs.shape[1]))
    return Drawn(tokens, chosen, top.indices, top.values)


def logprobs_by_stream(drawn: Drawn, rows: SamplingRows) -> dict[int, TokenLogprobs]:
    """Return logprobs by number of the streams that asked; wait for the device if they are there."""
    if rows.logprob_rows is None or drawn.chosen is None or drawn.top_ids is None or drawn.top_logprobs is None:
        return {}
    ids, values, chosen = drawn.top_ids.tolist(), drawn.top_logprobs.tolist(), drawn.chosen.tolist()
    found = {}
    for at, (number, top) in enumerate(zip(rows.logprob_streams, rows.logprob_tops, strict=True)):
        listed = list(zip(ids[at][:top], values[at][:top], strict=True))
        found[number] = TokenLogprobs(chosen[at], listed)
    return found


def is_plain(sampling: Sampling, vocabulary: int) -> bool:
    """Return True if nothing but temperature and seed matters, and no logprobs are asked for."""
    cut = not sampling.is_greedy and sampling.truncates(vocabulary)
    asked = sampling.top_logprobs is not None
    return not (cut or asked or sampling.has_penalties or sampling.has_token_rules)


def rows_for(drawing: Sequence[Segment], words: torch.Tensor, before: SamplingRows | None = None) -> SamplingRows:
    """Return rows for the segments that draw. `before` are the rows of the last step that drew. If the streams are the
    same, these are returned; otherwise their counts on the device are carried over. A new stream is counted from its
    text, all of which must be known here. `words`: the result of `token_hashes`."""
    streams = [segment.owner for segment in drawing]
    positions = [segment.position for segment in drawing]
    if before is not None and before.streams == streams and before.due == positions:  # `Stream` compares by identity
        return before
    device, vocabulary = words.device, words.shape[0]
    settings = [stream.sampling for stream in streams]
    drawn = [row for row, each in enumerate(settings) if not each.is_greedy]
    logprob_rows = [row for row, each in enumerate(settings) if each.top_logprobs is not None]
    rows = SamplingRows(
        streams,
        seeds=torch.tensor([seed_key(each.seed) for each in settings], dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        temperatures=torch.tensor(
            [1.0 if each.is_greedy else each.temperature for each in settings], dtype=torch.float32, device=device
        ).unsqueeze(1),
        words=words,
        truncation=truncation([settings[row] for row in drawn], vocabulary, device),
        token_rules=token_rules(streams, vocabulary, device),
        penalties=penalties(streams, _carried(streams, positions, before), vocabulary, device),
        next_positions=positions,
    )
    if len(drawn) < len(streams):
        greedy = [row for row, each in enumerate(settings) if each.is_greedy]
        rows.greedy = torch.tensor(greedy, device=device)
        rows.random = torch.tensor(drawn, device=device) if drawn else None
    if logprob_rows:
        rows.logprob_rows = torch.tensor(logprob_rows, device=device)
        rows.logprob_tops = [max(0, settings[row].top_logprobs or 0) for row in logprob_rows]
        rows.logprob_streams = [streams[row].number for row in logprob_rows]
    return rows


def _carried(streams: list[PagedStream], positions: list[int], before: SamplingRows | None) -> dict[int, CarriedCounts]:
    """Return the rows whose counts are in `before`, complete up to the position they draw now."""
    kept: dict[int, CarriedCounts] = {}
    if before is not None and before.penalties is not None:
        at, places = 0, {id(stream): row for row, stream in enumerate(streams)}
        for stream, start in zip(before.streams, before.next_positions, strict=True):
            if not stream.sampling.has_penalties:
                continue
            row = places.get(id(stream))
            if row is not None and positions[row] == start + before.steps:
                kept[row] = CarriedCounts(before.penalties, at)
            at += 1
    for row, stream in enumerate(streams):
        if stream.sampling.has_penalties and row not in kept:
            assert len(stream.tokens) == positions[row], f"{stream!r} was not counted, and its text is not known"
    return kept
