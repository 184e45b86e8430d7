"""From a plan to tokens: one step of a model over one range of KV pages.

Always true: a step is queued by `launch` and over when its `result` is there; on a CPU the two are one. On a GPU the
next step may be launched before: the tokens its rows begin with are then taken on the device (PENDING), from what the
step just before drew. Steps of plain decodes run as graphs where there are some (graphs.py); every other step is laid
out from the host's knowledge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from holdfast.core.requests import TokenLogprobs
from holdfast.engines.torch.batch import Batch, Segment, kernel_batch, on_device, step_batch
from holdfast.engines.torch.graphs import StepGraphs
from holdfast.engines.torch.model import Model, forward, logits
from holdfast.engines.torch.noise import token_words
from holdfast.engines.torch.sampling import Drawn, SamplingRows, draw, rows_for, told_logprobs
from holdfast.engines.torch.sequences import PENDING, StepPlan

EVENTS = 4  # over the steps that may be in flight: one is used again only when its step is long over
Tokens = dict[int, int]  # by stream number
Logprobs = dict[int, TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    numbers: list[int]  # streams that draw
    tokens: torch.Tensor  # on the host, once `ready`
    ready: torch.cuda.Event | None = None
    drawn: Drawn | None = None
    rows: SamplingRows | None = None

    def result(self) -> tuple[Tokens, Logprobs]:
        """Waits for the device. The tokens drawn, by stream, and logprobs for those who asked."""
        if self.ready is not None:
            self.ready.synchronize()
        told = told_logprobs(self.drawn, self.rows) if self.drawn is not None and self.rows is not None else {}
        return dict(zip(self.numbers, self.tokens.tolist(), strict=True)), told


class Computer:
    """`rows_max`: streams that may draw in one step."""

    def __init__(self, model: Model, kv: torch.Tensor, block_tokens: int, rows_max: int) -> None:
        self.model = model
        self.kv = kv
        self.block_tokens = block_tokens
        self.words = token_words(model.config.vocabulary, kv.device)
        self.ahead = 1 if kv.is_cuda and model.all_reduce is None else 0  # steps that may be in flight at a launch
        self.last = torch.zeros(rows_max, dtype=torch.int64, device=kv.device)  # what the latest step drew
        self.graphs: StepGraphs | None = None
        self._events: deque[torch.cuda.Event] = deque()  # the longest unused first
        self._rows: SamplingRows | None = None
        self._row_of: dict[int, int] = {}  # by stream number, in `last`
        self.tile_tokens = 0
        if kv.is_cuda and not model.exact:
            from holdfast.engines.torch.kernels_attention import tile_tokens  # loads triton

            self.tile_tokens = tile_tokens(model.heads, model.kv_heads)

    def compute(self, plan: StepPlan) -> tuple[Tokens, Logprobs]:
        """A step, and wait for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        sources = [self._row_of.get(segment.stream, 0) for segment in plan.segments]
        drawing = plan.drawing
        numbers = [segment.stream for segment in drawing]
        self._row_of = {number: row for row, number in enumerate(numbers)}
        if self.graphs is not None and self.graphs.run(plan.segments, sources):
            return self._told(numbers)
        hidden = forward(self.model, self.batch(plan.segments, sources), self.kv)
        if not drawing:
            return Launched([], self.last[:0])
        if len(drawing) < len(plan.segments):
            places = [place for place, segment in enumerate(plan.segments) if segment.wants_token]
            hidden = hidden.index_select(0, on_device(places, hidden.device))
        rows = self._rows = rows_for(drawing, self.words, self._rows)
        drawn = draw(logits(self.model, hidden), rows)
        rows.advance(drawn.tokens)
        self.last[: len(numbers)].copy_(drawn.tokens)
        return self._told(numbers, drawn, rows)

    def batch(self, segments: Sequence[Segment], sources: Sequence[int] = ()) -> Batch:
        """`sources`: for each segment, the row of `last` with its token if that is PENDING."""
        if not self.tile_tokens:
            batch = step_batch(segments, self.block_tokens, self.kv.dtype, self.kv.device, exact=self.model.exact)
        else:
            batch = kernel_batch(segments, self.block_tokens, self.kv.device, self.tile_tokens)
        if not any(segment.tokens[0] == PENDING for segment in segments):
            return batch
        from_rows = [source for source, each in zip(sources, segments, strict=True) for _ in each.tokens]
        taken = self.last.index_select(0, on_device(from_rows, self.last.device))
        return replace(batch, tokens=torch.where(batch.tokens == PENDING, taken, batch.tokens))

    def _told(self, numbers: list[int], drawn: Drawn | None = None, rows: SamplingRows | None = None) -> Launched:
        """The latest step's tokens on their way to the host."""
        if not self.kv.is_cuda:
            return Launched(numbers, self.last[: len(numbers)].clone(), drawn=drawn, rows=rows)
        tokens = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
        tokens.copy_(self.last[: len(numbers)], non_blocking=True)
        if len(self._events) < EVENTS:
            self._events.appendleft(torch.cuda.Event())  # type: ignore[no-untyped-call]
        ready = self._events.popleft()
        self._events.append(ready)
        ready.record()
        return Launched(numbers, tokens, ready, drawn, rows)
