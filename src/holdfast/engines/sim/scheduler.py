"""Which streams run, which wait, and what one step makes: no clock, no timers, no I/O.

Theory. A stream waits, runs, or is gone. Running takes ceil(length / block_size) KV blocks (`blocks` has the books); a
stream starts to run when there is a place and blocks for its tokens and one more. When a stream needs a block and
none is left, the youngest running stream gives up its blocks and goes to the head of the queue with its text kept, so
it later goes on with the same tokens. Always true: a stream alone always fits, because no text may grow past the
budget; tokens do not depend on who runs beside them; they do depend on what was read from the weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import Failure, GenerateRequest, Output
from holdfast.engines.sim.blocks import Blocks, blocks_for
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.settings import SimSettings
from holdfast.engines.sim.stream import Stream
from holdfast.engines.sim.vocabulary import Vocabulary


class Scheduler:
    """The streams of one engine. `prefill_s` draws how long the prefill of a stream without any known KV takes."""

    __slots__ = (
        "_failing",
        "_prefill_s",
        "_settings",
        "_streams",
        "_vocabulary",
        "blocks",
        "decoding",
        "early",
        "logprob_drift",
        "preemptions",
        "running",
        "waiting",
        "weights_right",
        "wrong_tokens",
    )

    def __init__(
        self, vocabulary: Vocabulary, settings: SimSettings, prefill_s: Callable[[], float], blocks: Blocks
    ) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self._prefill_s = prefill_s
        self._streams: dict[int, Stream] = {}  # running and waiting
        self._failing = False
        self.running: dict[int, Stream] = {}  # oldest first
        self.waiting: deque[Stream] = deque()
        self.early: list[Output] = []  # last outputs of requests that had nothing left to make
        self.blocks = blocks
        self.decoding = 0  # running streams that are past their prefill
        self.preemptions = 0
        self.wrong_tokens = False
        self.logprob_drift = 0.0
        self.weights_right: Callable[[], bool] | None = None  # reads of the weights what a step needs

    @property
    def blocks_used(self) -> int:
        return self.blocks.used

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
        if blocks_for(request.prompt_len + 1, settings.block_size) > settings.kv_blocks:
            room = f"{settings.kv_blocks} KV blocks of {settings.block_size}"
            raise _invalid(f"tokens: a prompt of {request.prompt_len} can never fit into {room}")
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

    def room_came(self, now: float) -> None:
        """Blocks became free by themselves."""
        self._admit(now)

    def poisoned(self, now: float) -> bool:
        """Whether a stream that runs now has the token that kills."""
        poison = self._settings.poison_token
        return any(stream.ready_at <= now and poison in stream.request.tokens for stream in self.running.values())

    def clear(self) -> list[int]:
        """Forget everything; answers which streams that were."""
        for stream in list(self.running.values()):
            self._leave(stream)
        gone = list(self._streams)
        self._streams.clear()
        self.waiting.clear()
        self.early.clear()
        return gone

    def next_ready(self) -> float:
        """When the first prefill is over, of the running streams; inf without any."""
        return min((stream.ready_at for stream in self.running.values()), default=math.inf)

    def step(self, now: float) -> list[Output]:
        """A token for every running stream whose prefill is over."""
        outputs = self._failures(now) if self._failing else []
        blocks, block_size = self.blocks, self._settings.block_size
        words, drift = blocks.words, self.logprob_drift
        wrong = self.wrong_tokens or (self.weights_right is not None and not self.weights_right())
        for stream in list(self.running.values()):
            if stream.ready_at > now:  # in prefill, or preempted in this very step
                continue
            sequence = stream.sequence
            if stream.blocks * block_size <= sequence.length and not self._grow(stream):
                continue
            if words is None:
                token = sequence.advance(wrong=wrong, drift=drift)
            else:
                at, tokens = stream.at, stream.tokens
                if at < 0:
                    blocks.prefill(stream)
                else:
                    words[at] = tokens[-1]
                    stream.at = at = at + 1
                    if not at % block_size:
                        blocks.filled(stream)
                token = sequence.advance(wrong=wrong, drift=drift)
                tokens.append(token)
            output = Output(stream.number, [token], cached=0 if stream.decodes else stream.cached)
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
        while not self.blocks.grow(stream):
            youngest = next(reversed(self.running.values()))
            self._leave(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is stream:
                return False
        return True

    def _admit(self, now: float) -> None:
        settings = self._settings
        while self.waiting and len(self.running) < settings.concurrency:
            stream = self.waiting[0]
            unknown = self.blocks.start(stream)
            if unknown is None:
                return  # first come, first served: nobody overtakes a long prompt for ever
            self.waiting.popleft()
            self.running[stream.number] = stream
            stream.ready_at = now + self._prefill_s() * unknown

    def _drop(self, stream: Stream) -> None:
        del self._streams[stream.number]
        self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """Stop running: give the blocks back."""
        del self.running[stream.number]
        self.blocks.end(stream)
        stream.ready_at = math.inf
        self.decoding -= stream.decodes
        stream.decodes = False


def _invalid(message: str) -> HoldfastError:
    return HoldfastError(Code.INVALID_REQUEST, message)
