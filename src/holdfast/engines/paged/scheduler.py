"""Which streams run, which wait, and what the next step computes: no torch, no clock, no I/O.

Theory. A stream waits, runs, or is gone. In line stand first those that come back with some of their answer, then those
that have shown nothing; of each the higher tiers first, and of a tier who came first; but nobody lets more than so many
who came later pass for each tier above its own, so that the lowest has its turn too. The first starts to run when there
is a place and blocks for its whole text and one token more. An engine that hears of it (`on_start`) may hold it back
until something is over that is no step of its own. A step first takes one token of every running stream whose prompt is
through (decodes), then, with what is left of its tokens, chunks of the other streams' texts, oldest first: so a long
prompt neither stops the running streams nor is stopped by them. When a stream needs a block and none is left, the
youngest running stream gives up its blocks and goes to the head of the queue with its text kept; what it had computed
may be found again by its key.

Steps ahead. `plan` may be called while up to `lookahead` planned steps have not retired. A stream whose newest token
is not known yet is planned with PENDING in its place: the device has the token. What such a step draws for a stream
that turned out to have ended is dropped at its retirement. Steps retire in the order they were planned.

Always true: blocks are released only when no step in flight may write them, whoever cancelled, finished or preempted
their stream meanwhile; a stream alone always fits, because no text may grow past the pool; after `cancel` nothing
more is said of a stream, and a last output is the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, GenerateRequest, Output, TokenLogprobs
from holdfast.engines.paged.blocks import Blocks
from holdfast.engines.paged.checks import check, end_of, invalid
from holdfast.engines.paged.sequences import PENDING, Segment, StepPlan, Stream
from holdfast.engines.paged.settings import SchedulerSettings

# How many who come later one in line lets pass, for each tier above its own: as many as may wait by default, so that a
# line in which nobody waits for long is in tiers' order.
PASSED_MAX = 256


class Scheduler:
    """The streams of one engine. One thread. `on_start` hears of each stream that gets a place and blocks."""

    def __init__(
        self, settings: SchedulerSettings, blocks: Blocks, on_start: Callable[[Stream], None] = lambda stream: None
    ) -> None:
        self.settings = settings
        self.blocks = blocks
        self._on_start = on_start
        self._streams: dict[int, Stream] = {}  # running and waiting
        self.running: dict[int, Stream] = {}  # oldest first
        self._prompts: dict[Stream, None] = {}  # of those, the ones that no step has brought to their text's end yet
        self.waiting: deque[Stream] = deque()  # in the order of their turns
        self._arrivals = 0
        self._canary: Stream | None = None  # of them all the one that has a place of its own
        self.early: list[Output] = []  # last outputs of requests that had nothing left to make
        self._in_flight: deque[StepPlan] = deque()  # `lookahead` + 1 at most
        self._leaving = 0  # streams out of `running` whose blocks a step in flight may still write
        self.steps = 0  # planned since the start
        self.preemptions = 0

    def __repr__(self) -> str:
        return (
            f"<scheduler: {len(self.running)} running, {len(self.waiting)} waiting, {len(self._in_flight)} steps in "
            f"flight, {self.preemptions} preemptions>"
        )

    def find(self, number: int) -> Stream | None:
        return self._streams.get(number)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    # -- requests

    def submit(self, number: int, request: GenerateRequest) -> None:
        """Take a request, or raise HoldfastError and change nothing."""
        if number in self._streams or any(output.stream == number for output in self.early):
            raise invalid(f"stream {number} is already in use")
        settings = self.settings
        check(request, settings, self.blocks)
        canary = request.tier == CANARY_TIER
        others = len(self._streams) - (self._canary is not None) + len(self.early)
        if self._canary is not None if canary else others >= settings.concurrency + settings.queue:
            why = f"{len(self.running)} streams run and {len(self.waiting)} wait here"
            raise HoldfastError(Code.WORKER_OVERLOADED, why)
        end = end_of(request, settings, self.blocks)
        if len(request.tokens) >= end:
            self.early.append(Output(number, [], "length"))
            return
        stream = Stream(number, request, end, settings.eos_token_ids)
        self._streams[number] = stream
        self._arrivals += 1
        # Shown: somebody reads it already, and it goes ahead of those of whom nobody has seen anything.
        stream.turn = (1 if stream.shown else 2, self._arrivals + request.tier * PASSED_MAX)
        if canary:
            self._canary, stream.turn = stream, (-1, 0)
        place = len(self.waiting)
        while place and self.waiting[place - 1].turn > stream.turn:
            place -= 1
        self.waiting.insert(place, stream)

    def cancel(self, number: int, *, unbegun: bool = False) -> bool:
        """Forget a stream; `unbegun`: if it has never run. Whether it was forgotten; unknown numbers are ignored."""
        stream = self._streams.get(number)
        if unbegun and (stream is None or stream.begun):
            return False
        self.early = [output for output in self.early if output.stream != number]
        if stream is not None:
            self._become_gone(stream)
        return stream is not None

    def take_early(self) -> list[Output]:
        """The last outputs that no step makes; to be handed over once."""
        taken, self.early = self.early, []
        return taken

    def clear(self) -> list[int]:
        """Forget everything, steps in flight too: the device must be drained. Answers which streams that were."""
        told = list(self._streams)
        held = {stream for plan in self._in_flight for stream in (segment.owner for segment in plan.segments)}
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
        return told

    # -- steps

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now: no stream, all of them ahead as far as may be,
        or no room until a step retires or quarantined blocks come back."""
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
        """One token of every running stream that lacks just that. This and `retire` run for every token there is: they
        call nothing that they need not."""
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
        """The step is over on the device and drew `tokens`, by stream, for every segment that draws. What it completed
        is published before this returns, so its outputs may be shown."""
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
                stream.tokens.append(token)  # of one that is gone too: a later step may have used it
                if not stream.gone:
                    output = Output(stream.number, [token])
                    outputs.append(output)
                    if end + 1 >= stream.end or token in stream.stops or end == stream.asked or logprobs:
                        self._tell_more(stream, output, logprobs)
            if not stream.runs and not stream.in_flight and stream.blocks:
                self._leaving -= 1
                self._release(stream)
        return outputs

    def _tell_more(self, stream: Stream, output: Output, logprobs: Mapping[int, TokenLogprobs] | None) -> None:
        """What only some outputs say: the first one, the last one, those of streams that asked for logprobs."""
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

    def _chunk(self, stream: Stream, left: int) -> Segment:
        """As much of what it lacks as the step has left."""
        start = stream.planned
        tokens = stream.tokens[start : start + left]
        stream.planned += len(tokens)
        stream.in_flight += 1
        wants_token = stream.planned == len(stream.tokens)
        if wants_token:
            stream.pending += 1
            del self._prompts[stream]
        return Segment(stream, tokens, start, stream.blocks, wants_token)

    # -- who runs

    def admit(self) -> None:
        """Let streams run while there is room. `plan` does so too, once those that run have what they need."""
        place = 0
        while place < len(self.waiting):
            stream, canary = self.waiting[place], self._canary
            others = len(self.running) - (canary is not None and canary.runs)
            if (place and not stream.shown) or (others >= self.settings.concurrency and stream is not canary):
                break
            if stream.blocks:  # preempted, and a step in flight may still write its old ones
                break
            known = self.blocks.start(stream)
            if known is None:
                if stream is canary and not place:  # what is spared is for those that come back, behind it too
                    place = 1
                    continue
                break  # who is first stays so: nobody overtakes a long prompt for ever
            del self.waiting[place]
            self.running[stream.number] = stream
            self._prompts[stream] = None
            stream.runs = stream.begun = True
            stream.planned = known
            if len(stream.tokens) == stream.asked:
                stream.cached = known
            self._on_start(stream)

    def _cover(self, stream: Stream) -> bool:
        """A block more, for its next position; False when there is none in this step, or it had to stop running."""
        while not self.blocks.grow(stream):
            # Blocks are on their way back: to preempt more would not bring them sooner.
            if self._leaving or self.blocks.room_soon:
                return False
            # A canary pushes nobody out.
            youngest = stream if stream is self._canary else next(reversed(self.running.values()))
            self._become_waiting(youngest)
            if youngest is stream:
                return False
        return True

    def _become_waiting(self, stream: Stream) -> None:
        self._stop_running(stream)
        stream.turn = (0, 0)  # it ran
        self.waiting.appendleft(stream)
        self.preemptions += 1

    def _become_gone(self, stream: Stream) -> None:
        stream.gone = True
        del self._streams[stream.number]
        if stream is self._canary:
            self._canary = None
        if stream.runs:
            self._stop_running(stream)
        else:
            self.waiting.remove(stream)

    def _stop_running(self, stream: Stream) -> None:
        del self.running[stream.number]
        self._prompts.pop(stream, None)
        stream.runs = stream.held = False
        if stream.in_flight:
            self._leaving += 1
        else:
            self._release(stream)

    def _release(self, stream: Stream) -> None:
        assert stream.in_flight == 0, f"{stream!r} may still be written"
        self.blocks.end(stream)
        stream.planned = 0
        stream.kept = None
