"""Questions and pings to one worker: sent, timed, and ended.

Always true: a question ends in exactly one of an answer, none, or no place, within its time, whatever becomes of the
connection; or the next takes its place, and nothing is told of it. Of either, and of pings, one at a time is out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from holdfast.control import words as w
from holdfast.core.errors import Code
from holdfast.core.requests import GenerateRequest, Output, Sampling, TokenLogprobs
from holdfast.health.breaker import blame
from holdfast.health.expectations import TOP, answer_of
from holdfast.wire.messages import Cancel, Generate, Ping, Pong

# Between two pings: what an idle worker that hangs may go unnoticed for. One is a frame each way.
PING_S = 4.0
# A worker's loop may be busy with one long step; a ping that is not answered by then is a failed check.
PONG_S = 10.0
# One that takes this long is a reason to ask a question, which shows more: work that does not move is seen in beats.
DOUBT_S = 1.0
REASON_CHARS_MAX = 500  # of what a worker says, which is written down

Send = Callable[[msgspec.Struct], bool]  # False: there is no connection


class Keeper(Protocol):
    """Who keeps the contacts."""

    def tell(self, event: w.Event) -> None:
        """Something happened."""

    def pinged(self, path: str, took_s: float | None) -> None:
        """A ping was answered, or not."""

    def is_sound(self, path: str, since_s: float) -> bool:
        """Whether another worker was heard of since then, or there is no other: it is not we who are cut off."""

    def hears(self, path: str, since_s: float) -> bool:
        """Whether another worker was heard of since then."""


@dataclass(slots=True)
class _Question:
    """One that is out."""

    number: int
    asked_s: float
    occupancy: float
    timer: asyncio.TimerHandle
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Asker:
    """What one worker is asked. `occupancy`: its streams over its places, without so many of ours."""

    def __init__(self, path: str, keeper: Keeper, send: Send, occupancy: Callable[[int], float]) -> None:
        self._path = path
        self._keeper = keeper
        self._send = send
        self._occupancy = occupancy
        self._loop = asyncio.get_running_loop()
        self._questions: dict[int, _Question] = {}  # by stream
        self._streams = 0
        self._ping: tuple[int, float] | None = None  # number and time of the one that is out
        self._pings = 0
        self._pinged_s = self._loop.time()
        self._doubted = False  # the ping that is out was late enough to ask a question

    def ask(self, question: w.Ask) -> None:
        """Its end is told, unless another is asked before."""
        for asked in list(self._questions):  # of a load that is gone: a worker has a place for one, and would refuse
            self._end(asked)
            self._send(Cancel([asked]))
        self._streams += 1
        stream, number = self._streams, question.number
        timer = self._loop.call_later(question.within_s, self._late, stream, question.within_s)
        self._questions[stream] = _Question(number, self._loop.time(), self._occupancy(0), timer)
        sampling = Sampling(question.tokens, seed=0, temperature=0.0, top_logprobs=TOP, ignore_eos=True)
        prompt = list(question.prompt)
        if not self._send(Generate(stream, GenerateRequest(f"canary-{number}", prompt, len(prompt), sampling))):
            # Not at once: whoever asks is in the middle of a step.
            self._loop.call_soon(self.unanswered, stream, "it is not connected")

    def take(self, output: Output) -> None:
        question = self._questions.get(output.stream)
        if question is None:
            return  # of one that was given up
        question.tokens += output.tokens
        question.logprobs += output.logprobs or ()
        if output.failure is not None and output.failure.code == Code.WORKER_OVERLOADED:
            self._end(output.stream)
            self._keeper.tell(w.NoPlace(self._path, question.number))
        elif output.failure is not None and output.failure.code == Code.INVALID_REQUEST:
            # The question's fault, which was ours to choose: of the worker it says nothing.
            self.unanswered(output.stream, f"it does not take the question: {output.failure.message}", ours=True)
        elif output.failure is not None:
            failed = blame(output.failure.code, tokens=0, finish=None) is not None
            self.unanswered(output.stream, f"{output.failure.code}: {output.failure.message}", failed=failed)
        elif output.finish is not None:
            self._end(output.stream)
            took_s = self._loop.time() - question.asked_s
            answer = answer_of(question.tokens, question.logprobs)
            occupancy = max(question.occupancy, self._occupancy(1))
            self._keeper.tell(w.Answer(self._path, question.number, answer, took_s, occupancy))

    def unanswered(self, stream: int, reason: str, *, ours: bool = False, failed: bool = False) -> None:
        """Tell that there was no whole answer. `ours`: by our own fault; `failed`: the worker said that it failed."""
        question = self._end(stream)
        reason = reason[:REASON_CHARS_MAX]
        if question is not None:
            sound = not ours and (failed or self._keeper.is_sound(self._path, question.asked_s))
            moving = bool(question.tokens)
            self._keeper.tell(w.NoAnswer(self._path, question.number, reason, moving, sound, failed))

    def lost(self, reason: str) -> None:
        """The connection is down, and whatever was out on it is over."""
        self._ping = None
        for stream in list(self._questions):
            self.unanswered(stream, reason)

    def _late(self, stream: int, within_s: float) -> None:
        self._send(Cancel([stream]))
        self.unanswered(stream, f"nothing whole came within {within_s:g} s")

    def _end(self, stream: int) -> _Question | None:
        question = self._questions.pop(stream, None)
        if question is not None:
            question.timer.cancel()
        return question

    # -- pings

    def tick(self, now_s: float) -> None:
        """Ping it now and then, and doubt it if that stays out."""
        if self._ping is None:
            if now_s - self._pinged_s >= PING_S and self._send(Ping(self._pings + 1)):
                self._pings += 1
                self._pinged_s, self._doubted = now_s, False
                self._ping = self._pings, now_s
            return
        waited_s = now_s - self._ping[1]
        if waited_s > DOUBT_S and not self._doubted:
            self._doubted = True
            self._keeper.tell(w.Doubted(self._path, f"a ping was not answered within {DOUBT_S:g} s"))
        if waited_s > PONG_S:
            self._ping = None
            self._keeper.pinged(self._path, None)

    def take_pong(self, pong: Pong) -> None:
        if self._ping is not None and pong.number == self._ping[0]:
            self._keeper.pinged(self._path, self._loop.time() - self._ping[1])
            self._ping = None
