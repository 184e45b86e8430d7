"""Computes one step of a model over one range of KV pages: from a plan to tokens.

Always true:
- `launch` queues a step, and the step is over when its `result` is there. On a CPU `launch` computes the step.
- On a GPU the next step may be launched before: its first tokens (PENDING) are then read on the device, from the draws
  of the step just before.
- Steps run as graphs if a large enough graph was captured (graphs.py). Rows that need more than a graph's plain draw
  are drawn after it, from its logits. All other steps run without a graph.
- Every segment of a step is checked, even if it draws nothing: its KV is about to be published.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.sequences import PENDING, PagedStream, Segment, StepPlan
from holdfast.engines.sampling import token_hashes
from holdfast.engines.torch.files.checkpoint import OnProgress
from holdfast.engines.torch.gpu.graphs import GraphInputs, StepGraphs
from holdfast.engines.torch.launched import LatestTokens, LaunchedStep, Logprobs, Tokens, row_sums
from holdfast.engines.torch.model.batch import Batch, kernel_batch, on_device, step_batch
from holdfast.engines.torch.model.batch import SegmentRows as AnySegment
from holdfast.engines.torch.model.decoder import BoundModel, forward, logits
from holdfast.engines.torch.sampling import Drawn, SamplingRows, draw, rows_for
from holdfast.memory.torch.ahead import pin_ahead

EVENTS = 4  # more than the steps in flight: an event is reused only long after its step is over


class Computer:
    """Makes the steps of one model over its mapped KV pages. `rows_max`: streams that may draw in one step."""

    def __init__(self, model: BoundModel, kv: torch.Tensor, block_tokens: int, rows_max: int) -> None:
        self.model = model
        self.kv = kv
        self.block_tokens = block_tokens
        self.words = token_hashes(model.config.vocabulary, kv.device)
        self.ahead = 1 if kv.is_cuda and model.all_reduce is None else 0  # steps that may be in flight at a launch
        self.latest = LatestTokens(rows_max, kv.device)
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
        """Launch a step and wait for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        sources = [self._row_of.get(segment.stream, 0) for segment in plan.segments]
        drawing = plan.drawing
        numbers = [segment.stream for segment in drawing]
        self._row_of = {number: row for row, number in enumerate(numbers)}
        places = self.graphs.run(plan.segments, sources) if self.graphs is not None else None
        if places is not None:
            return self._queued(numbers, len(plan.segments), *self._draw_again(drawing, places))
        return self._queued(numbers, *self._by_hand(plan.segments, drawing, sources))

    def _by_hand(
        self, segments: Sequence[Segment], drawing: Sequence[Segment], sources: Sequence[int]
    ) -> tuple[int, Drawn | None, SamplingRows | None]:
        """Compute the whole step without a graph; return the number of rows to check, and the draws."""
        hidden = forward(self.model, self.batch(segments, sources), self.kv)
        device, count, sums = hidden.device, len(drawing), self.latest.sums
        rest = [index for index, segment in enumerate(segments) if not segment.wants_token]
        if rest:  # with one sum for all of them: a stream that draws nothing may be the last row's
            sums[count : count + 1].copy_(row_sums(hidden.index_select(0, on_device(rest, device)).view(1, -1)))
        if not drawing:
            return 1, None, None
        if rest:
            places = [index for index, segment in enumerate(segments) if segment.wants_token]
            hidden = hidden.index_select(0, on_device(places, device))
        rows = self._rows = rows_for(drawing, self.words, self._rows)
        found = logits(self.model, hidden)
        drawn = draw(found, rows)
        rows.advance(drawn.tokens)
        self.latest.store(drawn.tokens, row_sums(found))
        return count + bool(rest), drawn, rows

    def _draw_again(
        self, drawing: Sequence[Segment], places: Sequence[int]
    ) -> tuple[Drawn | None, SamplingRows | None]:
        """Draw the rows at `places` again, from the logits that a graph left."""
        if not places or self.graphs is None:
            return None, None
        rows = self._rows = rows_for([drawing[index] for index in places], self.words, self._rows)
        at = on_device(places, self.kv.device)
        drawn = draw(self.graphs.logits.index_select(0, at), rows)
        rows.advance(drawn.tokens)
        self.latest.tokens.index_copy_(0, at, drawn.tokens)
        return drawn, rows

    def batch(self, segments: Sequence[AnySegment], sources: Sequence[int] = ()) -> Batch:
        """Return the batch of a step. `sources`: the row of `latest` with each segment's token if that is PENDING."""
        if not self.tile_tokens:
            batch = step_batch(segments, self.block_tokens, self.kv.dtype, self.kv.device, exact=self.model.exact)
        else:
            batch = kernel_batch(segments, self.block_tokens, self.kv.device, self.tile_tokens)
        if not any(segment.tokens[0] == PENDING for segment in segments):
            return batch
        from_rows = [source for source, each in zip(sources, segments, strict=True) for _ in each.tokens]
        taken = self.latest.tokens.index_select(0, on_device(from_rows, self.kv.device))
        return replace(batch, tokens=torch.where(batch.tokens == PENDING, taken, batch.tokens))

    def _queued(self, numbers: list[int], checked: int, drawn: Drawn | None, rows: SamplingRows | None) -> LaunchedStep:
        """Start to copy the latest step's results to the host."""
        outcome = self.latest.copy_to_host()
        asked = drawn.on_host() if drawn is not None and drawn.chosen is not None else None
        if not self.kv.is_cuda:
            return LaunchedStep(numbers, checked, outcome, None, asked, rows)
        if len(self._events) < EVENTS:
            self._events.appendleft(torch.cuda.Event())  # type: ignore[no-untyped-call]
        ready = self._events.popleft()
        self._events.append(ready)
        ready.record()
        return LaunchedStep(numbers, checked, outcome, ready, asked, rows)


WORK = "compile"  # kernels, and capture graphs

log = logging.getLogger("holdfast.engine")


def warm_up(computer: Computer, step_tokens_max: int, table_width: int, filler: int, progress: OnProgress) -> None:
    """Compile kernels, run products of all sizes and capture graphs, before a request must wait for them. Write only
    `filler`, a block that belongs to no stream.

    Run chunks of every power of two blocks up to the largest step, then capture all graphs. Under `exact` every row is
    a separate call, the same in any step, so one block is enough."""
    progress(WORK, 0, None)
    began_s = time.perf_counter()
    pin_ahead()
    tokens = computer.block_tokens
    most = 1 if computer.model.exact else max(1, step_tokens_max // tokens)
    for count in [*(1 << power for power in range(most.bit_length() - 1)), most]:
        computer.compute(_plan(count, tokens, filler))
    if computer.model.exact:
        ready_s = time.perf_counter()
        computer.compute(_plan(1, tokens, filler))
        each_ms = (time.perf_counter() - ready_s) * 1000 / tokens
        log.warning(
            "exact on a GPU: compiled in %.1f s; every position is computed by itself, without graphs, in %.1f ms: a "
            "prompt of 1,000 tokens takes %.0f s, and so do 1,000 tokens of all streams together",
            ready_s - began_s,
            each_ms,
            each_ms,
        )
    else:
        inputs = GraphInputs(computer.latest.rows, table_width, filler, computer.words)
        sizes = {"step_tokens_max": step_tokens_max, "tile": computer.tile_tokens}
        graphs = StepGraphs(computer.model, computer.kv, inputs, computer.latest, **sizes)
        graphs.capture()
        computer.graphs = graphs


def _plan(count: int, tokens: int, filler: int) -> StepPlan:
    """Return a step with `count` whole blocks of different texts; the first of them draws."""
    request = GenerateRequest("warm-up", [0] * tokens, tokens, Sampling(2, 0))
    streams = [PagedStream(-1 - number, request, tokens + 2, frozenset()) for number in range(count)]
    return StepPlan(0, [Segment(each, [0] * tokens, 0, [filler], number == 0) for number, each in enumerate(streams)])
