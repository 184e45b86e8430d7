"""A worker probe is control's connection to one worker: it sends canary questions and pings, watches the worker's
beats, and reports what comes as events. It decides nothing.

Questions and answers go through one connection, which is opened again when it breaks. The welcome contains the worker's
facts; messages or beats report changes (it wakes, it loads again).

Always true:
- A worker is reported as found only after its welcome, and as lost only when its connection is down and its key or its
  process is gone.
- Waits are bounded, so a worker that hangs blocks only its own probe.
- A question ends in time with exactly one event (answer, no answer, refusal), even if the connection breaks, unless the
  next question replaces it.
- At most one question and one ping are unanswered at a time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from holdfast.control import health_controller as hc
from holdfast.control.questions import known_of
from holdfast.control.worker_health import WorkerFacts, facts_of
from holdfast.core.address import parse_address
from holdfast.core.backoff import LAST_S, Backoff
from holdfast.core.errors import Code
from holdfast.core.ports import Network
from holdfast.core.requests import GenerateRequest, Output, Sampling, TokenLogprobs
from holdfast.core.tasks import beside
from holdfast.discovery.registry import Instance
from holdfast.health.breaker import classify_failure
from holdfast.health.expectations import TOP, answer_of
from holdfast.health.liveness import Liveness, LivenessChanged
from holdfast.health.watcher import CONNECT_TIMEOUT_S, BeatWatcher, Finding, is_local, probe
from holdfast.wire.messages import (
    Active,
    Beat,
    Cancel,
    Closed,
    Draining,
    Generate,
    Ping,
    Pong,
    Reload,
    Reloaded,
    Step,
    StepDown,
    ToFrontend,
    Welcome,
)
from holdfast.wire.worker_connection import WorkerConnection

log = logging.getLogger("holdfast.control")

# Pause between two pings: an idle worker that hangs is unnoticed for as long. A ping is a frame each way.
PING_S = 4.0
# Timeout of a ping, after which it is a failed check. Long, because a worker's loop may be busy with one long step.
PONG_S = 10.0
# A ping that takes this long makes the probe request a canary, which shows more. (Beats show work without progress.)
PING_LATE_S = 1.0
REASON_CHARS_MAX = 500  # of a worker's messages, which are written to the store
ENDED = frozenset("ZXx")
# Another worker counts as heard if something came from it within this time: an idle worker beats each second. Shorter
# than any silence that makes a worker GONE: of several workers that fall silent together none is evidence against
# another.
WITNESS_S = 1.2

Send = Callable[[msgspec.Struct], bool]  # False: there is no connection


class ProbeListener(Protocol):
    def on_event(self, event: hc.HealthEvent) -> None:
        """Apply an event."""

    def on_ping(self, path: str, took_s: float | None) -> None:
        """Count a ping; `took_s` is None if it was not answered."""

    def heard_other_or_alone(self, path: str, since_s: float) -> bool:
        """Return True if another worker was heard since `since_s` (control is not cut off), or there is no other."""

    def heard_other_since(self, path: str, since_s: float) -> bool:
        """Return True if another worker was heard since `since_s`."""


@dataclass(slots=True)
class _Question:
    number: int
    asked_at_s: float
    occupancy: float
    timer: asyncio.TimerHandle
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class CanaryAsker:
    """Sends one worker its questions and pings, and enforces their deadlines. `occupancy(own)` is the worker's streams
    over its places, without `own` streams of control."""

    def __init__(self, path: str, listener: ProbeListener, send: Send, occupancy: Callable[[int], float]) -> None:
        self._path = path
        self._listener = listener
        self._send = send
        self._occupancy = occupancy
        self._loop = asyncio.get_running_loop()
        self._questions: dict[int, _Question] = {}  # by stream
        self._streams = 0
        self._ping: tuple[int, float] | None = None  # number and time of the one that is out
        self._pings = 0
        self._pinged_s = self._loop.time()
        self._is_late = False  # the ping that is out was late enough to ask a question

    def ask(self, question: hc.AskWorker) -> None:
        """Ask the question; an event follows, unless another question is asked before."""
        for asked in list(self._questions):  # of an earlier load: a worker takes one question and would refuse this one
            self._end(asked)
            self._send(Cancel([asked]))
        self._streams += 1
        stream, number = self._streams, question.number
        timer = self._loop.call_later(question.within_s, self._late, stream, question.within_s)
        self._questions[stream] = _Question(number, self._loop.time(), self._occupancy(0), timer)
        sampling = Sampling(question.tokens, seed=0, temperature=0.0, top_logprobs=TOP, ignore_eos=True)
        prompt = list(question.prompt)
        if not self._send(Generate(stream, GenerateRequest(f"canary-{number}", prompt, len(prompt), sampling))):
            # Deferred, because the caller is in the middle of a step.
            self._loop.call_soon(self.end_unanswered, stream, "it is not connected")

    def on_output(self, output: Output) -> None:
        question = self._questions.get(output.stream)
        if question is None:
            return  # its question was given up
        question.tokens += output.tokens
        question.logprobs += output.logprobs or ()
        if output.failure is not None and output.failure.code == Code.WORKER_OVERLOADED:
            self._end(output.stream)
            self._listener.on_event(hc.CanaryRefused(self._path, question.number))
        elif output.failure is not None and output.failure.code == Code.INVALID_REQUEST:
            # Control chose the question, so a refusal says nothing about the worker.
            self.end_unanswered(output.stream, f"it does not take the question: {output.failure.message}", ours=True)
        elif output.failure is not None:
            failed = classify_failure(output.failure.code, tokens=0, finish=None) is not None
            self.end_unanswered(output.stream, f"{output.failure.code}: {output.failure.message}", failed=failed)
        elif output.finish is not None:
            self._end(output.stream)
            took_s = self._loop.time() - question.asked_at_s
            answer = answer_of(question.tokens, question.logprobs)
            occupancy = max(question.occupancy, self._occupancy(1))
            self._listener.on_event(hc.AnswerReceived(self._path, question.number, answer, took_s, occupancy))

    def end_unanswered(self, stream: int, reason: str, *, ours: bool = False, failed: bool = False) -> None:
        """End a question without a complete answer. `ours`: our own fault; `failed`: the worker reported an error."""
        question = self._end(stream)
        reason = reason[:REASON_CHARS_MAX]
        if question is not None:
            sound = not ours and (failed or self._listener.heard_other_or_alone(self._path, question.asked_at_s))
            moving = bool(question.tokens)
            self._listener.on_event(hc.AnswerMissing(self._path, question.number, reason, moving, sound, failed))

    def on_connection_lost(self, reason: str) -> None:
        """End the question and the ping that wait for an answer on the connection."""
        self._ping = None
        for stream in list(self._questions):
            self.end_unanswered(stream, reason)

    def _late(self, stream: int, within_s: float) -> None:
        self._send(Cancel([stream]))
        self.end_unanswered(stream, f"nothing whole came within {within_s:g} s")

    def _end(self, stream: int) -> _Question | None:
        question = self._questions.pop(stream, None)
        if question is not None:
            question.timer.cancel()
        return question

    # -- pings

    def tick(self, now_s: float) -> None:
        """Ping the worker every few seconds, and request a check if no answer comes."""
        if self._ping is None:
            if now_s - self._pinged_s >= PING_S and self._send(Ping(self._pings + 1)):
                self._pings += 1
                self._pinged_s, self._is_late = now_s, False
                self._ping = self._pings, now_s
            return
        waited_s = now_s - self._ping[1]
        if waited_s > PING_LATE_S and not self._is_late:
            self._is_late = True
            self._listener.on_event(hc.CheckNeeded(self._path, f"a ping was not answered within {PING_LATE_S:g} s"))
        if waited_s > PONG_S:
            self._ping = None
            self._listener.on_ping(self._path, None)

    def on_pong(self, pong: Pong) -> None:
        if self._ping is not None and pong.number == self._ping[0]:
            self._listener.on_ping(self._path, self._loop.time() - self._ping[1])
            self._ping = None


class CanaryConnection(WorkerConnection):
    """Carries questions to the worker and its answers back."""

    purpose = "canary"

    def __init__(self, probe: WorkerProbe, peer: str) -> None:
        super().__init__(peer)
        self._probe = probe

    def on_message(self, message: ToFrontend) -> None:
        self._probe.mark_heard()
        if self.welcomed:
            self._probe.on_message(message)
        super().on_message(message)


class WorkerProbe:
    """Probes one worker. `serving`: it may have traffic already; `token` authorizes actions from another machine."""

    def __init__(
        self,
        instance: Instance,
        network: Network,
        rng: random.Random,
        peer: str,
        listener: ProbeListener,
        *,
        serving: bool,
        token: str = "",
    ) -> None:
        self.instance = instance
        self.path = instance.key.path
        self._network = network
        self._rng = rng
        self._peer = peer
        self._listener = listener
        self._on_event = listener.on_event
        self._serving = serving
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._connection: CanaryConnection | None = None
        self._asker = CanaryAsker(self.path, listener, self._send, self._occupancy)
        self._is_lost = False
        self._is_local = False
        self._is_over = False
        self._last_words = ""  # the reason for its exit that it sent
        self._withheld: LivenessChanged | None = None  # "it is gone", until another worker is heard
        self.welcome: Welcome | None = None
        self.facts: WorkerFacts | None = None  # as last reported
        self.withdrawn = False  # its key is gone from the store
        self.heard_s = 0.0  # when anything last came from it
        self.reason = "connecting"
        self.beats = BeatWatcher(
            name=instance.name,
            address=instance.record.beat_address,
            network=network,
            peer=peer,
            check=self._check,
            on_finding=self._on_finding,
            on_failing=self._on_failing,
        )

    def __repr__(self) -> str:
        return f"<WorkerProbe {self.instance.name} {self.reason}, {self.beats!r}>"

    # -- the connection

    async def keep(self) -> None:
        """Connect, listen, reconnect, until the worker is withdrawn and its connection is down."""
        async with beside(self.beats.keep(), "beats"):
            await self._keep_connected()

    async def _keep_connected(self) -> None:
        backoff = Backoff(self._rng)
        while not (self.withdrawn and self._connection is None):
            began_s = self._loop.time()
            try:
                await self._session()
            except (OSError, ValueError) as error:
                self.reason = f"cannot connect: {error or type(error).__name__}"
            except Exception:
                log.exception("bug while connected to %s", self.instance.name)  # only this session ends
                self.reason = "internal error; the log has the details"
            self._check_lost()
            if self._loop.time() - began_s > LAST_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _session(self) -> None:
        """Run one connection, from connect to loss."""
        connection = CanaryConnection(self, self._peer)
        try:
            address = parse_address(self.instance.record.address)
            await self._network.connect(address, lambda: connection, CONNECT_TIMEOUT_S)
            welcome = await connection.welcome(CONNECT_TIMEOUT_S)
            self._check(welcome)
            if self._is_over:
                return
            self._connection, self.welcome, self.reason = connection, welcome, "connected"
            self._is_lost, self._is_local = False, is_local(welcome.process)
            known = known_of(self.instance.card, welcome.checksum, welcome.vocabulary)
            facts = facts_of(self.instance.name, welcome)
            self._report_facts(replace(facts, known=known, questions=self.instance.card.canaries_name()))
            self._on_inexact_reason(welcome.doubt)
            await connection.closed.wait()
            self.reason = str(connection.ended)
        finally:
            self._connection = None
            connection.abort()
            self._asker.on_connection_lost(self.reason)

    def _check(self, welcome: Welcome) -> None:
        """Raise ConnectionError if the process behind the address is not the one in the store."""
        key = self.instance.key
        expected = (key.instance, key.namespace, self.instance.record.checksum)
        if (welcome.instance, welcome.namespace, welcome.checksum) != expected:
            raise ConnectionError("another worker answers at its address")

    def end(self) -> None:
        """Stop, because the worker's key has another record: its process ended or belongs to another deployment."""
        self.withdrawn = self._is_over = True
        if self._connection is not None:
            self._connection.close()

    def withdraw(self) -> None:
        """Note that its key is gone from the store, which is ignored while the connection is open."""
        self.withdrawn = True
        self._check_lost()

    def _check_lost(self) -> None:
        if self._connection is not None or self._is_lost:
            return
        ended = self._has_process_ended()
        if self.withdrawn or ended:
            self._is_lost = True
            how = "its process ended" if ended else "it left the store, and its connection is down"
            how = f"{how}; it said: {self._last_words}" if self._last_words else how
            self.facts = None
            self._on_event(hc.WorkerLost(self.path, how))

    def _has_process_ended(self) -> bool:
        """Return True if /proc shows that a worker on this machine ended; its key may stay until the lease ends."""
        if self.welcome is None or not self._is_local:
            return False
        seen = probe(self.welcome.process)
        return seen.gone or seen.state in ENDED

    # -- from the worker

    def mark_heard(self) -> None:
        self.heard_s = self._loop.time()

    def on_message(self, message: object) -> None:
        match message:
            case Step():
                for output in message.outputs:
                    self._asker.on_output(output)
            case Closed():
                for stream in message.streams:
                    self._asker.end_unanswered(stream, "the worker closed the stream without its end")
            case Pong():
                self._asker.on_pong(message)
            case Reloaded():
                log.warning("%s: asked to verify its weights: %s", self.instance.name, message.outcome)
                if message.right:
                    self._on_event(hc.WeightsVerified(self.path, message.load))
            case Active() if self.facts is not None:
                self._report_facts(replace(self.facts, active=True))
                self._on_inexact_reason(message.doubt)
            case Draining() if self.facts is not None:
                self._report_facts(replace(self.facts, active=False))
            case _:
                pass  # messages for frontends

    def _on_inexact_reason(self, reason: str) -> None:
        """Request a check of a worker that reports that its answers may be wrong but keeps serving."""
        if reason:
            log.warning("%s: %s", self.instance.name, reason[:REASON_CHARS_MAX])
            self._on_event(hc.CheckNeeded(self.path, reason[:REASON_CHARS_MAX]))

    def _report_facts(self, facts: WorkerFacts) -> None:
        if facts != self.facts:
            serving, self._serving = self._serving, False
            self.facts = facts
            self._on_event(hc.WorkerFound(self.path, facts, serving))

    def _on_failing(self, reason: str) -> None:
        self._last_words = reason
        self._on_event(hc.EngineFailed(self.path, reason))

    def _on_finding(self, finding: Finding) -> None:
        if isinstance(finding, LivenessChanged):
            self._withheld = finding if finding.after is Liveness.GONE else None
            if self._withheld is None:
                self._on_event(hc.LivenessReported(self.path, finding))

    def _check_withheld(self, now_s: float) -> None:
        """Report a silent worker as gone once another worker is heard. A control that hears no worker may be cut off
        itself, and frontends with streams on the worker decide for themselves."""
        if self._withheld is not None and self._listener.heard_other_since(self.path, now_s - WITNESS_S):
            change, self._withheld = self._withheld, None
            self._on_event(hc.LivenessReported(self.path, change))

    def tick(self, now_s: float) -> None:
        """Check the beats, and ping; called ten times a second."""
        before = self.beats.last
        streams_open = before is not None and before.running > 0
        self.beats.tick(now_s, streams_open=streams_open)
        self._check_withheld(now_s)
        beat = self.beats.last
        if beat is not None and beat is not before:
            self.heard_s = now_s
            self._on_beat(beat)
        if self.facts is not None and self.facts.active:
            self._asker.tick(now_s)

    def _on_beat(self, beat: Beat) -> None:
        facts = self.facts
        if facts is not None and beat.load and beat.load != facts.load:
            self._report_facts(replace(facts, load=beat.load))

    # -- to the worker

    def ask(self, question: hc.AskWorker) -> None:
        self._asker.ask(question)

    def reload(self, request: hc.ReloadWeights) -> None:
        self._send(Reload(request.load, request.in_place, request.reason, self._token))

    def step_down(self, request: hc.HandOverToStandby) -> None:
        self._send(StepDown(request.believed, request.reason, self._token))

    def _send(self, message: msgspec.Struct) -> bool:
        if self._connection is None:
            return False
        self._connection.send(message)
        return True

    def _occupancy(self, own: int) -> float:
        """Return running and waiting streams over places, without `own` streams of control."""
        beat, welcome = self.beats.last, self.welcome
        if beat is None or welcome is None:
            return 0.0
        return max(0, beat.running + beat.waiting - own) / max(1, welcome.concurrency)
