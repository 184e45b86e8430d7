"""Decides which streams run, which wait, and what the next step computes: no torch, no clock, no I/O.

The queue. A stream waits, runs, or is gone. Waiting streams are ordered by:
- resumed streams (some of the answer was shown) before new ones,
- then higher tiers first, then arrival. At most `PASSED_MAX` later streams per tier may overtake a stream, so that the
  lowest tier runs too.

The first stream starts when there is a slot and blocks for its whole text and one more token. The engine gets
`on_start`, and may hold the stream back until work outside the steps is done. When a running stream needs a block and
none is free, the youngest running stream is preempted: it gives up its blocks and goes to the head of the queue. Its
text is kept, and its computed blocks may be found again by their keys.

A step first computes one token for every running stream with a computed prompt (decodes). The rest of its tokens goes
to chunks of the other streams' texts, oldest first. So a long prompt and the running streams do not stop each other.

Lookahead. `plan` may be called while up to `lookahead` planned steps have not retired. If a stream's newest token is
not known yet, PENDING stands for it: the device has the token. If the stream turns out to have ended, the token that
such a step drew is dropped when the step retires. Steps retire in the order they were planned.

Always true: blocks are released only when no step in flight may write them, even if their stream was cancelled,
finished or preempted. A stream alone always fits, because no text may grow past the pool. Nothing is output for a
stream after `cancel` or after its last output.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, GenerateRequest, Output, TokenLogprobs
from holdfast.engines.paged.blocks import Blocks, StreamCapacity, blocks_for
from holdfast.engines.paged.sequences import PENDING, PagedStream, Segment, StepPlan


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits of a paged engine."""

    vocabulary: int  # token ids are below this
    eos_token_ids: frozenset[int]  # end a stream unless it ignores them
    context_tokens_max: int  # prompt and answer together; an answer that reaches it ends with "length"
    concurrency: int = 64  # streams that run at once
    queue: int = 256  # streams that may wait besides; more are refused as WorkerOverloaded
    step_tokens_max: int = 512  # positions one step computes: bounds how long a prompt holds up the running streams
    lookahead: int = 0  # steps that may be in flight while the next is planned; 1 hides the host's work from a GPU

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context_tokens_max", "concurrency"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("queue", "lookahead"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not self.step_tokens_max > self.concurrency:  # else decodes alone could fill every step, and no prompt moves
            raise ValueError(f"step_tokens_max must be over the concurrency of {self.concurrency}")


# How many later streams may overtake a waiting one, for each tier of difference: as many as may wait by default, so
# that a queue in which no stream waits for long is ordered by tier.
PASSED_MAX = 256


class Scheduler:
    """The streams of one engine; not thread-safe. Calls `on_start` for each stream that gets a slot and blocks."""

    def __init__(
        self, settings: SchedulerSettings, blocks: Blocks, on_start: Callable[[PagedStream], None] = lambda stream: None
    ) -> None:
        self.settings = settings
        self.blocks = blocks
        self._on_start = on_start
        self._streams: dict[int, PagedStream] = {}  # running and waiting
        self.running: dict[int, PagedStream] = {}  # oldest first
        self._prompts: dict[PagedStream, None] = {}  # running streams with text that no step has computed yet
        self.waiting: deque[PagedStream] = deque()  # by `turn`
        self._arrivals = 0
        self._canary: PagedStream | None = None  # the stream in the extra slot for canaries
        self.early: list[Output] = []  # last outputs of requests that needed no further token
        self._in_flight: deque[StepPlan] = deque()  # `lookahead` + 1 at most
        self._leaving = 0  # streams no longer running, with blocks that a step in flight may still write
        self.steps = 0  # planned since the start
        self.preemptions = 0

    def __repr__(self) -> str:
        return (
            f"<scheduler: {len(self.running)} running, {len(self.waiting)} waiting, {len(self._in_flight)} steps in "
            f"flight, {self.preemptions} preemptions>"
        )

    def find(self, number: int) -> PagedStream | None:
        return self._streams.get(number)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    # -- requests

    def submit(self, number: int, request: GenerateRequest) -> None:
        """Queue a request, or raise HoldfastError and change nothing."""
        if number in self._streams or any(output.stream == number for output in self.early):
            raise invalid(f"stream {number} is already in use")
        settings = self.settings
        end = checked_end(request, settings, self.blocks)
        canary = request.tier == CANARY_TIER
        others = len(self._streams) - (self._canary is not None) + len(self.early)
        if self._canary is not None if canary else others >= settings.concurrency + settings.queue:
            why = f"{len(self.running)} streams run and {len(self.waiting)} wait here"
            raise HoldfastError(Code.WORKER_OVERLOADED, why)
        if len(request.tokens) >= end:
            self.early.append(Output(number, [], "length"))
            return
        stream = PagedStream(number, request, end, settings.eos_token_ids)
        self._streams[number] = stream
        self._arrivals += 1
        # Shown: a client already reads its answer, so it goes before new streams.
        stream.turn = (1 if stream.shown else 2, self._arrivals + request.tier * PASSED_MAX)
        if canary:
            self._canary, stream.turn = stream, (-1, 0)
        index = len(self.waiting)
        while index and self.waiting[index - 1].turn > stream.turn:
            index -= 1
        self.waiting.insert(index, stream)

    def cancel(self, number: int, *, unbegun: bool = False) -> bool:
        """Forget a stream (`unbegun`: only if it has never run); return True if it was known and forgotten."""
        stream = self._streams.get(number)
        if unbegun and (stream is None or stream.begun):
            return False
        self.early = [output for output in self.early if output.stream != number]
        if stream is not None:
            self._become_gone(stream)
        return stream is not None

    def take_early(self) -> list[Output]:
        """Return and remove the last outputs that need no step."""
        taken, self.early = self.early, []
        return taken

    def clear(self) -> list[int]:
        """Forget all streams and steps in flight; return the streams. The device must be drained."""
        forgotten = list(self._streams)
        held = {segment.owner for plan in self._in_flight for segment in plan.segments}
        for stream in held | set(self._streams.values()):
            stream.gone, stream.runs, stream.held = True, False, False
            stream.in_flight = stream.pending = 0
            self._release(stream)
        self._streams.clear()
        self._canary = None
        self.running.clear()
        self._prompts.clear()
        self.waiting.clear()
        self.early.clear()
        self._in_flight.clear()
        self._leaving = 0
        return forgotten

    # -- steps

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed now: there is no stream, all are planned as far
        ahead as allowed, or there is no room until a step retires or quarantined blocks come free."""
        assert len(self._in_flight) <= self.settings.lookahead, "retire a step first"
        segments = self._decodes()
        self.admit()
        left = self.settings.step_tokens_max - len(segments)
        for stream in list(self._prompts):
            if left <= 0:
                break
            if not stream.held:
                segments.append(self._chunk(stream, left))
                left -= len(segments[-1].tokens)
        if not segments:
            return None
        self.steps += 1
        plan = StepPlan(self.steps, segments)
        self._in_flight.append(plan)
        return plan

    def _decodes(self) -> list[Segment]:
        """Return a one-token segment for every running stream that lacks only one position. This and `retire` run for
        every token, so they avoid calls."""
        segments: list[Segment] = []
        size, prompts = self.blocks.block_tokens, self._prompts
        for stream in list(self.running.values()):
            start, pending = stream.planned, stream.pending
            end = start + 1
            if end != len(stream.tokens) + pending or end >= stream.end or stream.held or not stream.runs:
                continue
            if len(stream.blocks) * size <= start and not self._cover(stream):
                continue
            stream.planned = end
            stream.in_flight += 1
            stream.pending = pending + 1
            token = PENDING if pending else stream.tokens[start]
            segments.append(Segment(stream, [token], start, stream.blocks, True))
            if prompts:
                prompts.pop(stream, None)
        return segments

    def retire(
        self, plan: StepPlan, tokens: Mapping[int, int], logprobs: Mapping[int, TokenLogprobs] | None = None
    ) -> list[Output]:
        """Apply the results of a step that the device has finished: `tokens`, by stream, for every segment that draws.
        Blocks that it completed are published before this returns, so its outputs may be shown."""
        assert plan is self._in_flight[0], "steps retire in the order they were planned"
        self._in_flight.popleft()
        outputs, size = [], self.blocks.block_tokens
        for segment in plan.segments:
            stream, end = segment.owner, segment.start + len(segment.tokens)
            stream.in_flight -= 1
            if end % size == 0 or len(segment.tokens) > 1:  # it may have completed a block
                self.blocks.computed(stream, end)
            if segment.wants_token:
                stream.pending -= 1
                token = tokens[stream.number]
                stream.tokens.append(token)  # also if the stream is gone: a later step may have used the token
                if not stream.gone:
                    output = Output(stream.number, [token])
                    outputs.append(output)
                    if end + 1 >= stream.end or token in stream.stops or end == stream.asked or logprobs:
                        self._add_details(stream, output, logprobs)
            if not stream.runs and not stream.in_flight and stream.blocks:
                self._leaving -= 1
                self._release(stream)
        return outputs

    def _add_details(self, stream: PagedStream, output: Output, logprobs: Mapping[int, TokenLogprobs] | None) -> None:
        """Add the fields that only some outputs have: the first one, the last one, those with logprobs."""
        length = len(stream.tokens)
        if length == stream.asked + 1:
            output.cached = stream.cached
        if logprobs and stream.number in logprobs:
            output.logprobs = [logprobs[stream.number]]
        if stream.tokens[-1] in stream.stops and length > stream.stop_from:
            output.finish = "stop"
        elif length >= stream.end:
            output.finish = "length"
        if output.finish is not None:
            self._become_gone(stream)

    def _chunk(self, stream: PagedStream, left: int) -> Segment:
        """Return a segment with the stream's next positions, `left` at most."""
        start = stream.planned
        tokens = stream.tokens[start : start + left]
        stream.planned += len(tokens)
        stream.in_flight += 1
        wants_token = stream.planned == len(stream.tokens)
        if wants_token:
            stream.pending += 1
            del self._prompts[stream]
        return Segment(stream, tokens, start, stream.blocks, wants_token)

    # -- which streams run

    def admit(self) -> None:
        """Start waiting streams while there is room. `plan` calls this after the running streams got their blocks."""
        index = 0
        while index < len(self.waiting):
            stream, canary = self.waiting[index], self._canary
            others = len(self.running) - (canary is not None and canary.runs)
            if (index and not stream.shown) or (others >= self.settings.concurrency and stream is not canary):
                break
            if stream.blocks:  # preempted, and a step in flight may still write its old blocks
                break
            known = self.blocks.start(stream)
            if known is None:
                if stream is canary and not index:  # spared blocks are for resumed streams, also those behind it
                    index = 1
                    continue
                break  # the first stays first: otherwise a long prompt could be overtaken forever
            del self.waiting[index]
            self.running[stream.number] = stream
            self._prompts[stream] = None
            stream.runs = stream.begun = True
            stream.planned = known
            if len(stream.tokens) == stream.asked:
                stream.cached = known
            self._on_start(stream)

    def _cover(self, stream: PagedStream) -> bool:
        """Get a block for the stream's next position; return False if there is none in this step, or if the stream
        itself was preempted."""
        while not self.blocks.grow(stream):
            # Blocks come free soon anyway: preempting more streams would not be faster.
            if self._leaving or self.blocks.room_soon:
                return False
            # A canary preempts no other stream.
            youngest = stream if stream is self._canary else next(reversed(self.running.values()))
            self._stop_running(youngest)
            youngest.turn = (0, 0)  # it ran already: before all others
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is stream:
                return False
        return True

    def _become_gone(self, stream: PagedStream) -> None:
        stream.gone = True
        del self._streams[stream.number]
        if stream is self._canary:
            self._canary = None
        if stream.runs:
            self._stop_running(stream)
        else:
            self.waiting.remove(stream)

    def _stop_running(self, stream: PagedStream) -> None:
        del self.running[stream.number]
        self._prompts.pop(stream, None)
        stream.runs = stream.held = False
        if stream.in_flight:
            self._leaving += 1
        else:
            self._release(stream)

    def _release(self, stream: PagedStream) -> None:
        assert stream.in_flight == 0, f"{stream!r} may still be written"
        self.blocks.end(stream)
        stream.planned = 0
        stream.kept = None


def checked_end(request: GenerateRequest, settings: SchedulerSettings, blocks: StreamCapacity) -> int:
    """Return the length at which the text ends with "length"; a request of that length needs no further token. Raise
    HoldfastError for a request that no engine of this size can answer."""
    tokens, prompt_len = request.tokens, request.prompt_len
    if not tokens:
        raise invalid("tokens must not be empty")
    if not 1 <= prompt_len <= len(tokens):
        raise invalid(f"prompt_len must be 1 to the {len(tokens)} tokens given, got {prompt_len}")
    if prompt_len > settings.context_tokens_max:
        raise invalid(f"tokens: a prompt of {prompt_len} is over {settings.context_tokens_max}")
    if not request.sampling.repetition_penalty > 0:
        raise invalid(f"repetition_penalty must be over 0, got {request.sampling.repetition_penalty}")
    size = settings.vocabulary
    if any(not 0 <= token < size for token in request.sampling.logit_bias or ()):
        raise invalid(f"logit_bias has token ids outside 0 to {size - 1}")
    count, block_tokens = blocks.count, blocks.block_tokens
    if blocks_for(prompt_len + 1, block_tokens) > count:
        raise invalid(f"tokens: a prompt of {prompt_len} can never fit into {count} KV blocks of {block_tokens}")
    try:
        array("I", tokens)
        known = max(tokens) < size
    except OverflowError:  # a negative id: packing is cheaper than a min() over a long prompt
        known = False
    if not known:
        raise invalid(f"tokens has ids outside 0 to {size - 1}")
    return min(prompt_len + request.sampling.max_tokens, settings.context_tokens_max, count * block_tokens)


def invalid(message: str) -> HoldfastError:
    return HoldfastError(Code.INVALID_REQUEST, message)
