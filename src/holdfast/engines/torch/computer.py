"""From a plan to tokens: one step of a model over one range of KV pages.

Always true: a step is queued by `launch` and over when its `result` is there; on a CPU the two are one. On a GPU the
next step may be launched before: the tokens its rows begin with are then taken on the device (PENDING), from what the
step just before drew. Steps run as graphs where there are some that are large enough (graphs.py), and rows that want
more than a graph draws are drawn after it, from the logits it left; every other step is laid out from the host's
knowledge. Every segment of a step is checked, one that draws nothing too: what it computed is about to be published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.engines.paged.sequences import PENDING, Segment, StepPlan
from holdfast.engines.sampling.noise import token_words
from holdfast.engines.torch.gpu.graphs import StepGraphs
from holdfast.engines.torch.launched import Latest, Launched, Logprobs, Tokens, row_sums
from holdfast.engines.torch.model.batch import Batch, kernel_batch, on_device, step_batch
from holdfast.engines.torch.model.batch import Segment as AnySegment
from holdfast.engines.torch.model.bound import Model
from holdfast.engines.torch.model.decoder import forward, logits
from holdfast.engines.torch.sampling import Drawn, SamplingRows, draw, rows_for

EVENTS = 4  # over the steps that may be in flight: one is used again only when its step is long over


class Computer:
    """`rows_max`: streams that may draw in one step."""

    def __init__(self, model: Model, kv: torch.Tensor, block_tokens: int, rows_max: int) -> None:
        self.model = model
        self.kv = kv
        self.block_tokens = block_tokens
        self.words = token_words(model.config.vocabulary, kv.device)
        self.ahead = 1 if kv.is_cuda and model.all_reduce is None else 0  # steps that may be in flight at a launch
        self.latest = Latest(rows_max, kv.device)
        self.graphs: StepGraphs | None = None
        self._events: deque[torch.cuda.Event] = deque()  # the longest unused first
        self._rows: SamplingRows | None = None
        self._row_of: dict[int, int] = {}  # by stream number, in `latest`
        self.tile_tokens = 0
        if kv.is_cuda and model.exact:
            # cuDNN's attention builds a plan for every length it has not seen: on an H200 32 streams took three times
            # as long with it, and every start and takeover began with it.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if kv.is_cuda and not model.exact:
            from holdfast.engines.torch.gpu.kernels_attention import tile_tokens  # loads triton

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
        places = self.graphs.run(plan.segments, sources) if self.graphs is not None else None
        if places is not None:
            return self._told(numbers, len(plan.segments), *self._draw_again(drawing, places))
        return self._told(numbers, *self._by_hand(plan.segments, drawing, sources))

    def _by_hand(
        self, segments: Sequence[Segment], drawing: Sequence[Segment], sources: Sequence[int]
    ) -> tuple[int, Drawn | None, SamplingRows | None]:
        """The whole step laid out here. How many rows are to be checked, and what was drawn."""
        hidden = forward(self.model, self.batch(segments, sources), self.kv)
        device, count, sums = hidden.device, len(drawing), self.latest.sums
        rest = [place for place, segment in enumerate(segments) if not segment.wants_token]
        if rest:  # with one sum for all of them: a stream that draws nothing may be the last row's
            sums[count : count + 1].copy_(row_sums(hidden.index_select(0, on_device(rest, device)).view(1, -1)))
        if not drawing:
            return 1, None, None
        if rest:
            places = [place for place, segment in enumerate(segments) if segment.wants_token]
            hidden = hidden.index_select(0, on_device(places, device))
        rows = self._rows = rows_for(drawing, self.words, self._rows)
        found = logits(self.model, hidden)
        drawn = draw(found, rows)
        rows.advance(drawn.tokens)
        self.latest.take(drawn.tokens, row_sums(found))
        return count + bool(rest), drawn, rows

    def _draw_again(
        self, drawing: Sequence[Segment], places: Sequence[int]
    ) -> tuple[Drawn | None, SamplingRows | None]:
        """The rows at `places`, from the logits that a graph left of all of them."""
        if not places or self.graphs is None:
            return None, None
        rows = self._rows = rows_for([drawing[place] for place in places], self.words, self._rows)
        at = on_device(places, self.kv.device)
        drawn = draw(self.graphs.logits.index_select(0, at), rows)
        rows.advance(drawn.tokens)
        self.latest.tokens.index_copy_(0, at, drawn.tokens)
        return drawn, rows

    def batch(self, segments: Sequence[AnySegment], sources: Sequence[int] = ()) -> Batch:
        """`sources`: for each segment, the row of `latest` with its token if that is PENDING."""
        if not self.tile_tokens:
            batch = step_batch(segments, self.block_tokens, self.kv.dtype, self.kv.device, exact=self.model.exact)
        else:
            batch = kernel_batch(segments, self.block_tokens, self.kv.device, self.tile_tokens)
        if not any(segment.tokens[0] == PENDING for segment in segments):
            return batch
        from_rows = [source for source, each in zip(sources, segments, strict=True) for _ in each.tokens]
        taken = self.latest.tokens.index_select(0, on_device(from_rows, self.kv.device))
        return replace(batch, tokens=torch.where(batch.tokens == PENDING, taken, batch.tokens))

    def _told(self, numbers: list[int], checked: int, drawn: Drawn | None, rows: SamplingRows | None) -> Launched:
        """The latest step's outcome on its way to the host."""
        told = self.latest.told()
        asked = drawn.on_host() if drawn is not None and drawn.chosen is not None else None
        if not self.kv.is_cuda:
            return Launched(numbers, checked, told, None, asked, rows)
        if len(self._events) < EVENTS:
            self._events.appendleft(torch.cuda.Event())  # type: ignore[no-untyped-call]
        ready = self._events.popleft()
        self._events.append(ready)
        ready.record()
        return Launched(numbers, checked, told, ready, asked, rows)
