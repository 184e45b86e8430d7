"""Which streams run, which wait, and what one step makes: no clock, no timers, no I/O.

Theory. A stream waits, runs, or is gone. Running takes ceil(length / block_size) KV blocks; a stream starts to run when
there is a place and blocks for its tokens and one more. When a stream needs a block and none is left, the youngest
running stream gives up its blocks and goes to the head of the queue with its text kept, so it later goes on
with the same tokens. Always true: blocks in use are those of the running streams and never exceed the budget; a
stream alone always fits, because no text may grow past the budget; tokens do not depend on who runs beside them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import Failure, GenerateRequest, Output
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.settings import SimSettings
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, Vocabulary


class Stream:
    """One request inside the engine."""

    __slots__ = ("blocks", "decodes", "end", "fails_at", "number", "ready_at", "sequence", "stop_from", "stops")

    def __init__(self, number: int, sequence: Sequence, request: GenerateRequest, end: int) -> None:
        self.number = number
        self.sequence = sequence
        self.end = end  # the length at which it finishes with "length"
        self.stops = frozenset(request.stop_token_ids)
        if not request.sampling.ignore_eos:
            self.stops |= {EOS_TOKEN_ID}
        # A stop token counts once more than min_tokens were made: it comes on top of them, as in vLLM.
        self.stop_from = request.prompt_len + request.sampling.min_tokens
        self.fails_at: int | None = None  # a fault: the length at which it fails
        self.blocks = 0
        self.decodes = False  # has made a token since it started to run
        self.ready_at = math.inf  # when its prefill is over; inf while it waits


class Scheduler:
    """The streams of one engine. `prefill_s` draws how long a starting stream's prefill takes."""

    __slots__ = (
        "_failing",
        "_prefill_s",
        "_settings",
        "_streams",
        "_vocabulary",
        "blocks_used",
        "decoding",
        "early",
        "logprob_drift",
        "preemptions",
        "running",
        "waiting",
        "wrong_tokens",
    )

    def __init__(self, vocabulary: Vocabulary, settings: SimSettings, prefill_s: Callable[[], float]) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self._prefill_s = prefill_s
        self._streams: dict[int, Stream] = {}  # running and waiting
        self._failing = False
        self.running: dict[int, Stream] = {}  # oldest first
        self.waiting: deque[Stream] = deque()
        self.early: list[Output] = []  # last outputs of requests that had nothing left to make
        self.blocks_used = 0
        self.decoding = 0  # running streams that are past their prefill
        self.preemptions = 0
        self.wrong_tokens = False
        self.logprob_drift = 0.0

    @property
    def prefilling(self) -> bool:
        """Whether some running stream has made no token since it started to run."""
        return len(self.running) > self.decoding

    def submit(self, number: int, request: GenerateRequest, now: float) -> None:
        """Take a request, or raise HoldfastError and change nothing."""
        if number in self._streams or any(output.stream == number for output in self.early):
            raise HoldfastError(Code.INVALID_REQUEST, f"stream {number} is already in use")
        sequence = self._checked_sequence(request)
        settings = self._settings
        end = min(request.prompt_len + request.sampling.max_tokens, settings.context_tokens_max)
        end = min(end, settings.kv_blocks * settings.block_size)
        if len(self._streams) + len(self.early) >= settings.concurrency + settings.queue:
            raise HoldfastError(
                Code.WORKER_OVERLOADED, f"{len(self.running)} streams run and {len(self.waiting)} wait here"
            )
        if sequence.length >= end:
            self.early.append(Output(number, [], "length"))
            return
        stream = Stream(number, sequence, request, end)
        self._streams[number] = stream
        self.waiting.append(stream)
        self._admit(now)

    def _checked_sequence(self, request: GenerateRequest) -> Sequence:
        tokens, settings = request.tokens, self._settings
        if not tokens:
            raise _invalid("tokens must not be empty")
        if not 1 <= request.prompt_len <= len(tokens):
            raise _invalid(f"prompt_len must be 1 to the {len(tokens)} tokens given, got {request.prompt_len}")
        if request.prompt_len > settings.context_tokens_max:
            raise _invalid(f"tokens: a prompt of {request.prompt_len} is over {settings.context_tokens_max}")
        if not request.sampling.repetition_penalty > 0:
            raise _invalid(f"repetition_penalty must be over 0, got {request.sampling.repetition_penalty}")
        size = self._vocabulary.size
        if any(not 0 <= token < size for token in request.sampling.logit_bias or ()):
            raise _invalid(f"logit_bias has token ids outside 0 to {size - 1}")
        if self._blocks_for(request.prompt_len + 1) > settings.kv_blocks:
            raise HoldfastError(
                Code.RESOURCE_EXHAUSTED,
                f"a prompt of {request.prompt_len} tokens can never fit into {settings.kv_blocks} KV blocks "
                f"of {settings.block_size}",
            )
        try:
            sequence = Sequence(self._vocabulary, tokens, request.prompt_len, request.sampling, request.stop_token_ids)
        except OverflowError:  # a negative id, found while packing them: cheaper than a min() over a long prompt
            sequence = None
        if sequence is None or max(tokens) >= size:
            raise _invalid(f"tokens has ids outside 0 to {size - 1}")
        return sequence

    def cancel(self, number: int, now: float) -> None:
        """Forget a stream; unknown numbers are ignored."""
        self.early = [output for output in self.early if output.stream != number]
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        if number in self.running:
            self._leave(stream)
        else:
            self.waiting.remove(stream)
        self._admit(now)

    def cut(self, now: float) -> list[int]:
        """A fault: lose every running stream without a word; answers which."""
        lost = list(self.running.values())
        for stream in lost:
            self._drop(stream)
        self._admit(now)
        return [stream.number for stream in lost]

    def fail_after(self, tokens: int) -> None:
        """A fault: every running stream fails once it has made so many more tokens."""
        for stream in self.running.values():
            stream.fails_at = stream.sequence.length + tokens
        self._failing = bool(self.running)

    def recover(self, now: float) -> None:
        """Faults are over: nobody fails any more, and a prefill begun at a slow pace ends at the right one."""
        for stream in self._streams.values():
            stream.fails_at = None
        self._failing = False
        for stream in self.running.values():
            stream.ready_at = min(stream.ready_at, now + self._prefill_s())

    def clear(self) -> None:
        """Forget everything."""
        self._streams.clear()
        self.running.clear()
        self.waiting.clear()
        self.early.clear()
        self.blocks_used = self.decoding = 0

    def next_ready(self) -> float:
        """When the first prefill is over, of the running streams; inf without any."""
        return min((stream.ready_at for stream in self.running.values()), default=math.inf)

    def step(self, now: float) -> list[Output]:
        """A token for every running stream whose prefill is over."""
        outputs = self._failures(now) if self._failing else []
        block_size = self._settings.block_size
        wrong, drift = self.wrong_tokens, self.logprob_drift
        for stream in list(self.running.values()):
            if stream.ready_at > now:  # in prefill, or preempted in this very step
                continue
            sequence = stream.sequence
            if stream.blocks * block_size <= sequence.length and not self._grow(stream):
                continue
            token = sequence.advance(wrong=wrong, drift=drift)
            output = Output(stream.number, [token])
            if sequence.logprobs is not None:
                output.logprobs = [sequence.logprobs]
            outputs.append(output)
            if token in stream.stops and sequence.length > stream.stop_from:
                output.finish = "stop"
            elif sequence.length >= stream.end:
                output.finish = "length"
            else:
                if not stream.decodes:
                    stream.decodes = True
                    self.decoding += 1
                continue
            self._drop(stream)
        self._admit(now)
        return outputs

    def _failures(self, now: float) -> list[Output]:
        failed = [
            stream
            for stream in self.running.values()
            if stream.fails_at is not None and stream.ready_at <= now and stream.sequence.length >= stream.fails_at
        ]
        for stream in failed:
            self._drop(stream)
        self._failing = any(stream.fails_at is not None for stream in self._streams.values())
        failure = Failure(Code.ENGINE_SHUTDOWN, "the engine failed on command (fault error_after)")
        return [Output(stream.number, [], failure=failure) for stream in failed]

    def _grow(self, stream: Stream) -> bool:
        """One block more for `stream`; False when it had to go back to waiting itself."""
        if self.blocks_used >= self._settings.kv_blocks:
            youngest = next(reversed(self.running.values()))
            self._leave(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is stream:
                return False
        self.blocks_used += 1
        stream.blocks += 1
        return True

    def _admit(self, now: float) -> None:
        settings = self._settings
        while self.waiting and len(self.running) < settings.concurrency:
            stream = self.waiting[0]
            blocks = self._blocks_for(stream.sequence.length + 1)
            if self.blocks_used + blocks > settings.kv_blocks:
                return  # first come, first served: nobody overtakes a long prompt for ever
            self.waiting.popleft()
            self.running[stream.number] = stream
            stream.blocks = blocks
            self.blocks_used += blocks
            stream.ready_at = now + self._prefill_s()

    def _drop(self, stream: Stream) -> None:
        del self._streams[stream.number]
        self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """Stop running: give the blocks back."""
        del self.running[stream.number]
        self.blocks_used -= stream.blocks
        stream.blocks = 0
        stream.ready_at = math.inf
        self.decoding -= stream.decodes
        stream.decodes = False

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._settings.block_size)


def _invalid(message: str) -> HoldfastError:
    return HoldfastError(Code.INVALID_REQUEST, message)
