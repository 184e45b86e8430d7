"""`WorkerLiveness` decides, for one observer, whether a worker is alive. Pure: no I/O, no clock, `now_s` is passed in.

States of a worker that seems to hang:

| state | beats | evidence | what follows |
|---|---|---|---|
| SUSPECT | none | silence alone | no new work; its process is probed in /proc |
| STARVED | none | /proc: able to run, but gets no CPU time | no new work; the observer waits, up to a limit |
| STOPPED | none | /proc: stopped, frozen or dead, or starved too long | streams move; the supervisor kills it |
| GONE | none | /proc cannot be read from here, and the silence is longer | streams move; nothing is killed |
| WEDGED | come | their step count does not change although there is work | streams move; the supervisor kills it |
| MUTE | come | no tokens and no answers to pings come | no new work |
| DEAF | come | the same, for much longer | streams move; nothing is killed |

Theory (facts 31, 24). A starved worker must never be mistaken for a stopped or wedged one. Two rules follow:
- Silence is counted only in the observer's on-time ticks: a late tick shows that the observer itself was starved.
- Only what /proc shows, or starving for too long, makes a worker STOPPED. Where /proc cannot be read, 1.5 s of silence
  means that the host is gone: streams move, which can be undone.
A worker that comes back after its streams were moved is on PROBATION first.

A worker that is not visible in /proc can be pinged on the data connection, which tests the loop that serves requests.
If it is silent and does not answer, it is GONE sooner. If it beats but sends no token, it is MUTE once it has not
answered for longer than its steps may take. It is DEAF only long after that, because an overloaded host answers late
(facts 31). A worker that answers is only slow.

Always true:
- `TABLE` contains every change of state; an event without an entry raises `LivenessError` and changes nothing.
- ALIVE and PROBATION imply an open beat connection.
- Streams are moved off a worker exactly when its state enters `LOST`; only `ROUTABLE` workers get work.
- There are no deadlines: time is measured in the observer's ticks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.wire.messages import Beat

TICK_S = 0.1
# A tick counts only if it is about one tick after the last: if it is later, the observer itself was delayed; if it is
# earlier, the observer is catching up.
TICK_EARLY_S = 0.5 * TICK_S
TICK_LATE_S = 2.0 * TICK_S

# With open streams beats come every 0.2 s, at worst 0.23 s late on an overloaded machine (facts 31): after 0.5 s the
# worker is SUSPECT.
SUSPECT_TICKS = 5
# Without work beats come every 1 s: 1.5 s.
SUSPECT_IDLE_TICKS = 15
# A worker that cannot be probed: 1.5 s with open streams; without, a second idle beat must have been missed.
GONE_TICKS = 15
GONE_IDLE_TICKS = 25
# The same with open streams, if it has not answered a ping for half a second: found within 1.5 s of its end.
GONE_ASKED_TICKS = 11
UNANSWERED_TICKS = 5
# It beats, streams are open, and no data comes: it is pinged early enough to be MUTE after one second.
ASK_TICKS = 7
MUTE_TICKS = 10
# Without streams it is pinged every 2 s; a worker that does not answer is found within 5 s.
ASK_IDLE_TICKS = 20
MUTE_IDLE_TICKS = 30
# An event loop was seen to be 2.0 s late on an overloaded machine (facts 31), and its answer may wait for a step.
DEAF_TICKS = 50
# A thread that must wake 5 times a second and made no context switch in 0.5 s is not running (facts 31).
STILL_TICKS = 5
# How long the observer waits for a starved worker.
STARVED_TICKS_MAX = 100

# Wedged: the step count has not changed for the longest of this time, 30 of this worker's slow steps, and the step
# budget that it declared.
WEDGED_MS_MIN = 1000.0
WEDGED_STEPS = 30.0

PROBATION_S = 2.0
PROBATION_S_MAX = 30.0
PROBATION_ADMIT_MAX = 2
# A return this soon after the last is flapping: each one doubles the probation.
FLAP_S = 60.0
# A wedged engine without work makes no steps. It gets work again after this pause.
WEDGED_PAUSE_S = 10.0

_STOPPED_STATES = frozenset("TtZXx")


class Liveness(StrEnum):
    """The state of a worker. The values are labels of metrics."""

    NEW = "new"  # no beat connection yet
    ALIVE = "alive"
    SUSPECT = "suspect"
    MUTE = "mute"
    STARVED = "starved"
    STOPPED = "stopped"
    WEDGED = "wedged"
    GONE = "gone"
    DEAF = "deaf"
    PROBATION = "probation"  # came back: gets a little work


class LivenessCause(StrEnum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    SILENT = "silent"  # no sign of life for longer than the interval of its beats allows
    LIFE = "life"  # a beat or data from a worker that kept its streams
    LIFE_OWING = "life-owing"  # the same, before its probation is over
    STARVING = "starving"  # the probe shows that it is able to run
    STOP_SEEN = "stop-seen"  # the probe shows that it is stopped, frozen or dead
    TOO_LONG = "too-long"  # starved past the hard limit
    HOST_SILENT = "host-silent"  # it cannot be probed, and is silent past the limit for that
    UNANSWERED = "unanswered"  # it was pinged, and sent no answer and no other data
    IGNORED = "ignored"  # the same, for too long
    STUCK = "stuck"  # a beat shows work, but no step
    RETURNED = "returned"  # after its streams were moved it beats or steps again
    PROVED = "proved"  # its probation is over


V, C = Liveness, LivenessCause

_TRUSTED = {C.SILENT: V.SUSPECT, C.DISCONNECTED: V.SUSPECT, C.STUCK: V.WEDGED, C.UNANSWERED: V.MUTE}
_SUSPECTED = {C.LIFE: V.ALIVE, C.LIFE_OWING: V.PROBATION, C.STUCK: V.WEDGED}
_LOOKED_AT = {C.STARVING: V.STARVED, C.STOP_SEEN: V.STOPPED, C.TOO_LONG: V.STOPPED, C.HOST_SILENT: V.GONE}

TABLE: dict[Liveness, dict[LivenessCause, Liveness]] = {
    V.NEW: {C.CONNECTED: V.ALIVE},
    V.ALIVE: _TRUSTED,
    V.PROBATION: {**_TRUSTED, C.PROVED: V.ALIVE},
    V.MUTE: {**_SUSPECTED, C.SILENT: V.SUSPECT, C.DISCONNECTED: V.SUSPECT, C.IGNORED: V.DEAF},
    V.SUSPECT: {**_SUSPECTED, **_LOOKED_AT, C.CONNECTED: V.SUSPECT, C.DISCONNECTED: V.SUSPECT},
    V.STARVED: {**_SUSPECTED, **_LOOKED_AT, C.CONNECTED: V.STARVED, C.DISCONNECTED: V.STARVED},
    V.STOPPED: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.STOPPED, C.DISCONNECTED: V.STOPPED},
    V.GONE: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.GONE, C.DISCONNECTED: V.GONE},
    V.DEAF: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.DEAF, C.DISCONNECTED: V.DEAF},
    V.WEDGED: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.WEDGED, C.DISCONNECTED: V.WEDGED},
}

ROUTABLE = frozenset({V.ALIVE, V.PROBATION})
PROBED = frozenset({V.SUSPECT, V.STARVED})  # probed at every tick, where possible
LOST = frozenset({V.STOPPED, V.WEDGED, V.GONE, V.DEAF})


class LivenessError(Exception):
    """An event is impossible in this state, which is a bug of the observer. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The beat connection is open *and the process sent its welcome*: the kernel accepts connections for a stopped
    process too."""

    local: bool  # its process can be read in /proc from here
    answers: bool = False  # the observer has a data connection to it on which it answers pings


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The beat connection is lost."""


@dataclass(frozen=True, slots=True)
class DataReceived:
    """Tokens or an answer came on the data connection."""


@dataclass(frozen=True, slots=True)
class LivenessTick:
    """The observer ticks, ten times a second."""

    streams_open: bool = False  # the observer has streams on this worker


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The process's state in /proc, with the letters used there; "" where there is nothing to read."""

    gone: bool  # no such pid, or another process has it
    state: str = ""
    frozen: bool = False
    thread_state: str = ""
    switches: int = 0  # context switches of the beat thread since its start


LivenessEvent = Connected | Disconnected | DataReceived | Beat | LivenessTick | ProbeResult


@dataclass(frozen=True, slots=True)
class LivenessChanged:
    """The state has changed, and with it whether the worker is routable."""

    before: Liveness
    after: Liveness
    reason: str


@dataclass(frozen=True, slots=True)
class SetProbing:
    """Probe the process now and at every tick, and pass the results to `WorkerLiveness.step`; or stop probing."""

    on: bool


@dataclass(frozen=True, slots=True)
class AskOnData:
    """Ping the worker on the data connection, to see that its loop runs. The answer arrives as `DataReceived`."""


@dataclass(frozen=True, slots=True)
class MoveLostStreams:
    """Resume this worker's streams elsewhere. Leave the worker itself alone."""

    reason: str


LivenessEffect = LivenessChanged | SetProbing | AskOnData | MoveLostStreams


class WorkerLiveness:
    """One observer's view of one worker. Slotted and mutable: it is stepped ten times a second for every worker."""

    __slots__ = (
        "_answers", "_asked", "_beat", "_beats", "_connected", "_given", "_idle_since_s", "_local", "_must_step",
        "_mute", "_mute_busy", "_owing", "_probation_s", "_probing", "_returned_at_s", "_silent", "_silent_busy",
        "_stepped", "_still_since", "_switches", "_ticked_at_s", "_ticks", "_ticks_served", "name", "reason", "state",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = Liveness.NEW
        self.reason = "no beat connection yet"
        self._connected = False
        self._local = False  # its process can be probed from here
        self._answers = False  # it cannot be probed, but answers pings
        self._beat: Beat | None = None
        # On-time ticks: all; since the last sign of life; and of those the ones with work. The count of silent ticks
        # starts at -1, because the next tick ends an interval that had a sign of life.
        self._ticked_at_s: float | None = None
        self._ticks = 0
        self._silent = -1
        self._silent_busy = -1
        # The same since the last data (beats do not count), and the tick of the first ping since then.
        self._mute = -1
        self._mute_busy = -1
        self._asked: int | None = None
        # Probe: the beat thread's context switches when they last changed, and the tick of that change.
        self._probing = False
        self._switches: int | None = None
        self._still_since = 0
        # Return: whether the probation is still to be served, and what was seen since it began.
        self._owing = False
        self._must_step = False
        self._probation_s = PROBATION_S
        self._returned_at_s: float | None = None
        self._idle_since_s: float | None = None
        self._ticks_served = 0
        self._beats = 0
        self._stepped = False
        self._given = False

    def __repr__(self) -> str:
        return f"{self.name}: {self.state} ({self.reason})"

    @property
    def routable(self) -> bool:
        return self.state in ROUTABLE

    @property
    def admit_max(self) -> int | None:
        """Return how many streams this observer may have open on the worker; None: as many as the worker takes."""
        if self.state is Liveness.PROBATION:
            return PROBATION_ADMIT_MAX
        return None if self.state is Liveness.ALIVE else 0

    def step(self, event: LivenessEvent, now_s: float) -> tuple[LivenessEffect, ...]:
        match event:
            case LivenessTick():
                return self._tick(now_s, event.streams_open)
            case Beat():
                return self._on_beat(now_s, event)
            case DataReceived():
                return self._on_data(now_s)
            case ProbeResult():
                return self._on_probe(now_s, event)
            case Connected():
                return self._connect(now_s, event)
            case Disconnected():
                return self._disconnect(now_s)

    def _connect(self, now_s: float, event: Connected) -> tuple[LivenessEffect, ...]:
        if self._connected:
            raise LivenessError(f"{self!r}: connected twice")
        self._target(LivenessCause.CONNECTED)
        self._connected, self._local = True, event.local
        self._answers = event.answers and not event.local
        self._mark_heard()
        return self._turn(now_s, LivenessCause.CONNECTED, "beat connection open")

    def _disconnect(self, now_s: float) -> tuple[LivenessEffect, ...]:
        if not self._connected:
            raise LivenessError(f"{self!r}: disconnected without a connection")
        self._target(LivenessCause.DISCONNECTED)
        self._connected = False
        return self._turn(now_s, LivenessCause.DISCONNECTED, "its beat connection broke")

    def _on_data(self, now_s: float) -> tuple[LivenessEffect, ...]:
        """Note data from the worker. Cheap unless the worker was silent or mute."""
        self._silent = self._silent_busy = self._mute = self._mute_busy = -1
        self._asked = None
        if self.state is Liveness.DEAF:
            self._must_step = False
            return self._turn(now_s, LivenessCause.RETURNED, "it answers again")
        if self.state not in PROBED and self.state is not Liveness.MUTE:
            return ()
        self._mark_heard()
        if not self._connected:
            return ()
        return self._turn(now_s, self._life(), "it sends data again")

    def _on_beat(self, now_s: float, beat: Beat) -> tuple[LivenessEffect, ...]:
        if not self._connected:
            raise LivenessError(f"{self!r}: a beat without a connection")
        moved = self._beat is not None and beat.steps != self._beat.steps
        self._beat = beat
        self._mark_heard()
        limit_ms = wedged_after_ms(beat)
        if _has_work(beat) and beat.stuck_ms >= limit_ms:
            self._idle_since_s = None
            why = f"no step for {beat.stuck_ms / 1000:.1f} s with {beat.running} running, {beat.waiting} waiting"
            return self._turn(now_s, LivenessCause.STUCK, f"{why} (limit {limit_ms / 1000:.1f} s)")
        if self.state in PROBED:
            return self._turn(now_s, self._life(), "it beats again")
        if self.state in LOST:
            return self._consider_return(now_s, beat, moved)
        self._beats += 1
        self._stepped |= moved
        self._given |= _has_work(beat)
        return ()

    def _tick(self, now_s: float, streams_open: bool) -> tuple[LivenessEffect, ...]:
        gap_s = TICK_LATE_S + 1.0 if self._ticked_at_s is None else now_s - self._ticked_at_s
        if gap_s < TICK_EARLY_S:
            return ()  # the observer is catching up; the next tick is measured from the last one that counted
        self._ticked_at_s = now_s
        if gap_s > TICK_LATE_S:
            return ()
        self._ticks += 1
        self._mute += 1
        self._mute_busy += streams_open
        if self.state in LOST or self.state is Liveness.NEW:
            return self._ask() if self.state is Liveness.DEAF else ()
        self._silent += 1
        # Counted separately: work that begins in the middle of an idle second is not 0.5 s of silence yet.
        if streams_open or (self._beat is not None and _has_work(self._beat)):
            self._silent_busy += 1
        self._given |= streams_open
        silent = self.state in PROBED
        found = self._check_suspect(now_s) if silent else self._check_silence(now_s) or self._check_mute(now_s)
        return found + self._ask() if self.state in PROBED else found

    def _on_probe(self, now_s: float, probe: ProbeResult) -> tuple[LivenessEffect, ...]:
        """Apply a probe's result; ignore it if probing has stopped."""
        if not self._probing:
            return ()
        if why := stopped_reason(probe):
            return self._turn(now_s, LivenessCause.STOP_SEEN, why)
        first = self._switches is None
        moved = not first and probe.switches != self._switches
        starved = moved or probe.thread_state in ("R", "")
        if first or starved:
            self._switches, self._still_since = probe.switches, self._ticks
        if starved:
            return self._turn(now_s, LivenessCause.STARVING, f"{self._silence()}, but its process is able to run")
        if self._ticks - self._still_since < STILL_TICKS:
            return ()
        still = f"its beat thread (state {probe.thread_state}) made no context switch for {STILL_TICKS * TICK_S:.1f} s"
        return self._turn(now_s, LivenessCause.STOP_SEEN, still)

    def _check_silence(self, now_s: float) -> tuple[LivenessEffect, ...]:
        """Check the silence of a worker that is ALIVE, MUTE or on PROBATION, at a tick that counts."""
        if self._silent_busy >= SUSPECT_TICKS or self._silent >= SUSPECT_IDLE_TICKS:
            return self._turn(now_s, LivenessCause.SILENT, self._silence())
        if self.state is not Liveness.PROBATION:
            return ()
        self._ticks_served += 1
        served = self._ticks_served * TICK_S >= self._probation_s - TICK_S / 2 and self._beats >= 2
        if not served or not (self._stepped or not (self._given or self._must_step)):
            return ()
        return self._turn(now_s, LivenessCause.PROVED, f"on time for {self._probation_s:g} s of probation")

    def _check_suspect(self, now_s: float) -> tuple[LivenessEffect, ...]:
        """Check a worker that is SUSPECT or STARVED, at a tick that counts."""
        unanswered = self._unanswered() >= UNANSWERED_TICKS
        limit = GONE_ASKED_TICKS if unanswered else GONE_TICKS
        if not self._local and (self._silent_busy >= limit or self._silent >= GONE_IDLE_TICKS):
            asked = "it does not answer" if unanswered else "its process cannot be seen from here"
            return self._turn(now_s, LivenessCause.HOST_SILENT, f"{self._silence()}, and {asked}")
        if self._local and self._silent >= STARVED_TICKS_MAX:
            return self._turn(now_s, LivenessCause.TOO_LONG, f"{self._silence()}: starved for too long")
        return ()

    def _check_mute(self, now_s: float) -> tuple[LivenessEffect, ...]:
        """Check a beating worker that is ALIVE, MUTE or on PROBATION by its data and answers, at a tick that counts."""
        if not self._answers:
            return ()
        if self._asked is None:
            due = self._mute_busy >= ASK_TICKS or self._mute >= ASK_IDLE_TICKS
            return self._ask() if due else ()
        beat = self._beat if self._beat is not None and _has_work(self._beat) else None
        may_take = round(wedged_after_ms(beat) / 1000 / TICK_S) if beat is not None else 0  # a step delays answers
        unanswered = self._unanswered()
        why = f"it beats, but nothing came for {self._mute * TICK_S:.1f} s, not even an answer"
        if self.state is Liveness.MUTE:
            ignored = unanswered >= max(DEAF_TICKS, may_take + MUTE_TICKS)
            return self._turn(now_s, LivenessCause.IGNORED, why) if ignored else self._ask()
        mute = self._mute_busy >= max(MUTE_TICKS, may_take) or self._mute >= max(MUTE_IDLE_TICKS, may_take)
        return self._turn(now_s, LivenessCause.UNANSWERED, why) if mute else ()

    def _ask(self) -> tuple[LivenessEffect, ...]:
        """Ping the worker, if possible, and again every 2 s: an answer may have been lost with a connection."""
        if not self._answers or (self._asked is not None and self._unanswered() % ASK_IDLE_TICKS):
            return ()
        if self._asked is None:
            self._asked = self._ticks
        return (AskOnData(),)

    def _unanswered(self) -> int:
        """Return the ticks since the first unanswered ping."""
        return 0 if self._asked is None else self._ticks - self._asked

    def _consider_return(self, now_s: float, beat: Beat, moved: bool) -> tuple[LivenessEffect, ...]:
        if self.state is Liveness.DEAF:
            return ()
        if self.state is not Liveness.WEDGED:
            self._must_step = False
            return self._turn(now_s, LivenessCause.RETURNED, "it beats again")
        if moved:
            self._must_step = False
            return self._turn(now_s, LivenessCause.RETURNED, "its step moves again")
        if _has_work(beat):
            self._idle_since_s = None
            return ()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if now_s - self._idle_since_s < max(WEDGED_PAUSE_S, self._probation_s):
            return ()
        self._must_step = True  # idleness proves nothing about its steps: it stays on probation until it makes one
        return self._turn(now_s, LivenessCause.RETURNED, "it has had no work for a while and is tried again")

    def _target(self, cause: LivenessCause) -> Liveness:
        after = TABLE[self.state].get(cause)
        if after is None:
            raise LivenessError(f"{self!r}: {cause} cannot happen")
        return after

    def _turn(self, now_s: float, cause: LivenessCause, why: str) -> tuple[LivenessEffect, ...]:
        before, after = self.state, self._target(cause)
        effects: list[LivenessEffect] = []
        if before is not after:
            self.state, self.reason = after, why
            effects.append(LivenessChanged(before, after, why))
            if after is Liveness.PROBATION:
                self._begin_probation(now_s, fresh=cause is LivenessCause.RETURNED)
            self._owing &= after is not Liveness.ALIVE
            if after in LOST and before not in LOST:
                effects.append(MoveLostStreams(why))
        probe = self._local and after in PROBED
        if probe is not self._probing:
            self._probing, self._switches = probe, None
            effects.append(SetProbing(probe))
        return tuple(effects)

    def _begin_probation(self, now_s: float, *, fresh: bool) -> None:
        if fresh:
            flaps = self._returned_at_s is not None and now_s - self._returned_at_s <= FLAP_S
            self._probation_s = min(2 * self._probation_s, PROBATION_S_MAX) if flaps else PROBATION_S
            self._returned_at_s = now_s
        self._owing, self._idle_since_s = True, None
        self._ticks_served = self._beats = 0
        self._stepped = self._given = False

    def _mark_heard(self) -> None:
        self._silent = self._silent_busy = -1
        self._switches = None

    def _life(self) -> LivenessCause:
        return LivenessCause.LIFE_OWING if self._owing else LivenessCause.LIFE

    def _silence(self) -> str:
        lost = "" if self._connected else "beat connection broken, "
        return f"{lost}silent for {max(0, self._silent) * TICK_S:.1f} s"


def wedged_after_ms(beat: Beat) -> float:
    """Return for how long this worker's step count may stay the same (facts 31d)."""
    return max(WEDGED_MS_MIN, WEDGED_STEPS * beat.step_ms_p99, beat.budget_ms)


def stopped_reason(probe: ProbeResult) -> str | None:
    """Return why this probe proves the process stopped or dead, or None."""
    if probe.gone:
        return "its process is gone"
    if probe.frozen:
        return "its cgroup is frozen"
    for state in (probe.state, probe.thread_state):
        if state and state in _STOPPED_STATES:
            return f"its process is {'stopped' if state in 'Tt' else 'dead'} (state {state})"
    return None


def _has_work(beat: Beat) -> bool:
    return beat.running + beat.waiting > 0
