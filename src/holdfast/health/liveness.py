"""Is a worker alive, as one observer sees it? A pure judge: no I/O, no clock, `now_s` is passed in.

Theory (facts 31, 24). A *stopped* process sends no beats; a *wedged* engine sends beats whose step count does not
move while work is there; a *starved* one sends beats late, and must never be taken for either. Therefore:
silence is counted only in the observer's own on-time ticks, because a late tick shows that the observer itself
was starved; silence alone makes a suspect (no new work, nothing moved); only the kernel's word about the process
makes it stopped; and where the kernel cannot be asked, 1.5 s of silence means the host is gone: streams move,
which can be undone, and nothing is killed. Whoever comes back after its streams were moved serves a probation.

One that cannot be looked at can be asked, on the connection that its work comes by and through the loop that does it.
Silent and without an answer it is gone sooner. One that beats and yet brings no token is doubted when it does not
answer either for longer than its steps may take, and given up only long after that: a swamped host answers late
(facts 31), and whoever answers is slow, which is nothing.

Always true: `TABLE` is every change of verdict there is; an event it has no entry for raises `LivenessError` and
changes nothing; ALIVE and PROBATION imply an open beat connection; streams are moved off a worker exactly when its
verdict enters `LOST`; only `ROUTABLE` ones get work. There is no deadline to ask for: its time is its observer's ticks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.wire.messages import Beat

TICK_S = 0.1
# A tick proves something only if it is about one tick after the last: later, and the observer was held up
# itself; earlier, and it is catching up after having been.
TICK_EARLY_S = 0.5 * TICK_S
TICK_LATE_S = 2.0 * TICK_S

# With open streams beats come every 0.2 s, at worst 0.23 s late on a swamped machine (facts 31): 0.5 s is a suspect.
SUSPECT_TICKS = 5
# Without work they come every 1 s: half as much again.
SUSPECT_IDLE_TICKS = 15
# A host that cannot be looked at: 1.5 s with open streams; without, a second idle beat must have been missed.
GONE_TICKS = 15
GONE_IDLE_TICKS = 25
# The same with open streams, where it was asked and has not answered for half a second: found within 1.5 s of its end.
GONE_ASKED_TICKS = 11
UNANSWERED_TICKS = 5
# It beats, streams are open, and nothing comes: it is asked, so that a second of that can make a doubt.
ASK_TICKS = 7
MUTE_TICKS = 10
# Without streams it is asked every 2 s; one that does not answer is found within 5.
ASK_IDLE_TICKS = 20
MUTE_IDLE_TICKS = 30
# An event loop was seen to be 2.0 s late on a swamped machine (facts 31), and its answer may wait for a step.
DEAF_TICKS = 50
# A thread that must wake 5 times a second and made no context switch in 0.5 s is not running (facts 31).
STILL_TICKS = 5
# Starved means wait, but not for ever.
STARVED_TICKS_MAX = 100

# Wedged: the step has not moved for this long, or 30 of this worker's slow steps, or what it declared.
WEDGED_MS_MIN = 1000.0
WEDGED_STEPS = 30.0

PROBATION_S = 2.0
PROBATION_S_MAX = 30.0
PROBATION_ADMIT_MAX = 2
# A return this soon after the last is flapping: each doubles the probation.
FLAP_S = 60.0
# A wedged engine whose work was taken away can show no step. It is tried again after this rest.
WEDGED_REST_S = 10.0

_STOPPED_STATES = frozenset("TtZXx")


class Verdict(StrEnum):
    NEW = "new"  # no beat connection yet
    ALIVE = "alive"
    SUSPECT = "suspect"  # silent: no new work, nothing moved
    MUTE = "mute"  # beats, and neither work nor an answer comes: no new work, nothing moved
    STARVED = "starved"  # silent, but its process is able to run: wait
    STOPPED = "stopped"  # the kernel says it does not run: move streams
    WEDGED = "wedged"  # beats, but its steps do not move: move streams
    GONE = "gone"  # silent, and it cannot be looked at: move streams, kill nothing
    DEAF = "deaf"  # beats, and has answered nothing for too long: move streams, kill nothing
    PROBATION = "probation"  # came back: gets a little work


class Cause(StrEnum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    SILENT = "silent"  # for longer than its beats allow
    LIFE = "life"  # a beat or data from one that was only doubted
    LIFE_OWING = "life-owing"  # the same, from one whose probation is not over
    STARVING = "starving"  # the probe: it could run
    STOP_SEEN = "stop-seen"  # the probe: it is stopped, frozen or dead
    TOO_LONG = "too-long"  # starved past the hard limit
    HOST_SILENT = "host-silent"  # no probe possible, and silent past that limit
    UNANSWERED = "unanswered"  # asked, and neither an answer nor anything else came
    IGNORED = "ignored"  # the same, for too long
    STUCK = "stuck"  # a beat: work there, no step
    RETURNED = "returned"  # one whose streams were moved shows life, or steps
    PROVED = "proved"  # probation served


V, C = Verdict, Cause

_TRUSTED = {C.SILENT: V.SUSPECT, C.DISCONNECTED: V.SUSPECT, C.STUCK: V.WEDGED, C.UNANSWERED: V.MUTE}
_DOUBTED = {C.LIFE: V.ALIVE, C.LIFE_OWING: V.PROBATION, C.STUCK: V.WEDGED}
_LOOKED_AT = {C.STARVING: V.STARVED, C.STOP_SEEN: V.STOPPED, C.TOO_LONG: V.STOPPED, C.HOST_SILENT: V.GONE}

TABLE: dict[Verdict, dict[Cause, Verdict]] = {
    V.NEW: {C.CONNECTED: V.ALIVE},
    V.ALIVE: _TRUSTED,
    V.PROBATION: {**_TRUSTED, C.PROVED: V.ALIVE},
    V.MUTE: {**_DOUBTED, C.SILENT: V.SUSPECT, C.DISCONNECTED: V.SUSPECT, C.IGNORED: V.DEAF},
    V.SUSPECT: {**_DOUBTED, **_LOOKED_AT, C.CONNECTED: V.SUSPECT, C.DISCONNECTED: V.SUSPECT},
    V.STARVED: {**_DOUBTED, **_LOOKED_AT, C.CONNECTED: V.STARVED, C.DISCONNECTED: V.STARVED},
    V.STOPPED: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.STOPPED, C.DISCONNECTED: V.STOPPED},
    V.GONE: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.GONE, C.DISCONNECTED: V.GONE},
    V.DEAF: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.DEAF, C.DISCONNECTED: V.DEAF},
    V.WEDGED: {C.RETURNED: V.PROBATION, C.STUCK: V.WEDGED, C.CONNECTED: V.WEDGED, C.DISCONNECTED: V.WEDGED},
}

ROUTABLE = frozenset({V.ALIVE, V.PROBATION})
PROBED = frozenset({V.SUSPECT, V.STARVED})  # doubted: looked at every tick, where it can be
LOST = frozenset({V.STOPPED, V.WEDGED, V.GONE, V.DEAF})


class LivenessError(Exception):
    """An event that cannot happen in this verdict: a bug of the observer. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The beat connection is open *and welcomed*: a kernel accepts connections for a stopped process too."""

    local: bool  # its process can be looked at from here
    answers: bool = False  # the observer has a data connection to it on which it answers when asked


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The beat connection broke."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Something came on the data connection: work, or an answer."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The observer's own tick."""

    streams_open: bool = False  # the observer has streams on this worker


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the kernel says of the process, at one look. Letters as in /proc; "" where there is nothing to read."""

    gone: bool  # no such pid, or another process has it by now
    state: str = ""
    frozen: bool = False
    thread_state: str = ""
    switches: int = 0  # of the beat thread, voluntary or not, since its start


Event = Connected | Disconnected | Traffic | Beat | Tick | ProbeResult


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict changed; whether it is routable follows from it."""

    before: Verdict
    after: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Look at the process now and at every tick, and tell the judge."""


@dataclass(frozen=True, slots=True)
class StopProbe:
    """Stop looking."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask it on the data connection whether its engine's loop goes round; an answer is `Traffic` like any other."""


@dataclass(frozen=True, slots=True)
class MoveStreams:
    """Resume this worker's streams elsewhere. The worker itself is not to be touched."""

    reason: str


Effect = Judged | StartProbe | StopProbe | Ask | MoveStreams


class Judge:
    """One observer's view of one worker. Slotted and mutable: it is stepped ten times a second for every worker."""

    __slots__ = (
        "_answers", "_asked", "_beat", "_beats", "_connected", "_given", "_idle_since", "_local", "_must_step", "_mute",
        "_mute_busy", "_owing", "_probation_s", "_probing", "_returned_at", "_silent", "_silent_busy", "_stepped",
        "_still_since", "_switches", "_ticked_at", "_ticks", "_ticks_served", "name", "reason", "verdict",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.verdict = Verdict.NEW
        self.reason = "no beat connection yet"
        self._connected = False
        self._local = False  # its process can be looked at from here
        self._answers = False  # it cannot, but it can be asked
        self._beat: Beat | None = None
        # Time, counted in on-time ticks: all, since the last sign of life, and of those the ones with work open.
        # Silence starts at -1: the tick that follows a sign ends an interval that had one.
        self._ticked_at: float | None = None
        self._ticks = 0
        self._silent = -1
        self._silent_busy = -1
        # The same, since anything came but beats; and when it was asked, since then.
        self._mute = -1
        self._mute_busy = -1
        self._asked: int | None = None
        # Probe: the beat thread's switches as last seen to change, and the tick of that.
        self._probing = False
        self._switches: int | None = None
        self._still_since = 0
        # Return: probation is owed until proved; what was seen since it began.
        self._owing = False
        self._must_step = False
        self._probation_s = PROBATION_S
        self._returned_at: float | None = None
        self._idle_since: float | None = None
        self._ticks_served = 0
        self._beats = 0
        self._stepped = False
        self._given = False

    def __repr__(self) -> str:
        return f"{self.name}: {self.verdict} ({self.reason})"

    @property
    def routable(self) -> bool:
        return self.verdict in ROUTABLE

    @property
    def admit_max(self) -> int | None:
        """How many streams this observer may have open there; None: as many as the worker takes."""
        if self.verdict is Verdict.PROBATION:
            return PROBATION_ADMIT_MAX
        return None if self.verdict is Verdict.ALIVE else 0

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Take what happened; what the observer is to do, in order."""
        match event:
            case Tick():
                return self._tick(now_s, event.streams_open)
            case Beat():
                return self._hear_beat(now_s, event)
            case Traffic():
                return self._hear_traffic(now_s)
            case ProbeResult():
                return self._look(now_s, event)
            case Connected():
                return self._connect(now_s, event)
            case Disconnected():
                return self._disconnect(now_s)

    def _connect(self, now_s: float, event: Connected) -> tuple[Effect, ...]:
        if self._connected:
            raise LivenessError(f"{self!r}: connected twice")
        self._target(Cause.CONNECTED)
        self._connected, self._local = True, event.local
        self._answers = event.answers and not event.local
        self._hear()
        return self._turn(now_s, Cause.CONNECTED, "beat connection open")

    def _disconnect(self, now_s: float) -> tuple[Effect, ...]:
        if not self._connected:
            raise LivenessError(f"{self!r}: disconnected without a connection")
        self._target(Cause.DISCONNECTED)
        self._connected = False
        return self._turn(now_s, Cause.DISCONNECTED, "its beat connection broke")

    def _hear_traffic(self, now_s: float) -> tuple[Effect, ...]:
        """A few stores unless the worker was doubted."""
        self._silent = self._silent_busy = self._mute = self._mute_busy = -1
        self._asked = None
        if self.verdict is Verdict.DEAF:
            self._must_step = False
            return self._turn(now_s, Cause.RETURNED, "it answers again")
        if self.verdict not in PROBED and self.verdict is not Verdict.MUTE:
            return ()
        self._hear()
        if not self._connected:
            return ()
        return self._turn(now_s, self._life(), "it sends data again")

    def _hear_beat(self, now_s: float, beat: Beat) -> tuple[Effect, ...]:
        if not self._connected:
            raise LivenessError(f"{self!r}: a beat without a connection")
        moved = self._beat is not None and beat.steps != self._beat.steps
        self._beat = beat
        self._hear()
        limit_ms = wedged_after_ms(beat)
        if _has_work(beat) and beat.stuck_ms >= limit_ms:
            self._idle_since = None
            why = f"no step for {beat.stuck_ms / 1000:.1f} s with {beat.running} running, {beat.waiting} waiting"
            return self._turn(now_s, Cause.STUCK, f"{why} (limit {limit_ms / 1000:.1f} s)")
        if self.verdict in PROBED:
            return self._turn(now_s, self._life(), "it beats again")
        if self.verdict in LOST:
            return self._consider_return(now_s, beat, moved)
        self._beats += 1
        self._stepped |= moved
        self._given |= _has_work(beat)
        return ()

    def _tick(self, now_s: float, streams_open: bool) -> tuple[Effect, ...]:
        gap_s = TICK_LATE_S + 1.0 if self._ticked_at is None else now_s - self._ticked_at
        if gap_s < TICK_EARLY_S:
            return ()  # catching up; the next one is measured from the last that counted
        self._ticked_at = now_s
        if gap_s > TICK_LATE_S:
            return ()
        self._ticks += 1
        self._mute += 1
        self._mute_busy += streams_open
        if self.verdict in LOST or self.verdict is Verdict.NEW:
            return self._ask() if self.verdict is Verdict.DEAF else ()
        self._silent += 1
        # Counted apart, because work that begins in the middle of an idle second is not 0.5 s of silence yet.
        if streams_open or (self._beat is not None and _has_work(self._beat)):
            self._silent_busy += 1
        self._given |= streams_open
        doubted = self.verdict in PROBED
        found = self._weigh_doubt(now_s) if doubted else self._weigh_silence(now_s) or self._weigh_mute(now_s)
        return found + self._ask() if self.verdict in PROBED else found

    def _look(self, now_s: float, probe: ProbeResult) -> tuple[Effect, ...]:
        """An answer that comes when it is not wanted any more is ignored."""
        if not self._probing:
            return ()
        if why := stopped_reason(probe):
            return self._turn(now_s, Cause.STOP_SEEN, why)
        first = self._switches is None
        moved = not first and probe.switches != self._switches
        starved = moved or probe.thread_state in ("R", "")
        if first or starved:
            self._switches, self._still_since = probe.switches, self._ticks
        if starved:
            return self._turn(now_s, Cause.STARVING, f"{self._silence()}, but its process is able to run")
        if self._ticks - self._still_since < STILL_TICKS:
            return ()
        still = f"its beat thread (state {probe.thread_state}) made no context switch for {STILL_TICKS * TICK_S:.1f} s"
        return self._turn(now_s, Cause.STOP_SEEN, still)

    def _weigh_silence(self, now_s: float) -> tuple[Effect, ...]:
        """ALIVE, MUTE or PROBATION, at a tick that counts."""
        if self._silent_busy >= SUSPECT_TICKS or self._silent >= SUSPECT_IDLE_TICKS:
            return self._turn(now_s, Cause.SILENT, self._silence())
        if self.verdict is not Verdict.PROBATION:
            return ()
        self._ticks_served += 1
        served = self._ticks_served * TICK_S >= self._probation_s - TICK_S / 2 and self._beats >= 2
        if not served or not (self._stepped or not (self._given or self._must_step)):
            return ()
        return self._turn(now_s, Cause.PROVED, f"on time for {self._probation_s:g} s of probation")

    def _weigh_doubt(self, now_s: float) -> tuple[Effect, ...]:
        """SUSPECT or STARVED, at a tick that counts."""
        unanswered = self._unanswered() >= UNANSWERED_TICKS
        limit = GONE_ASKED_TICKS if unanswered else GONE_TICKS
        if not self._local and (self._silent_busy >= limit or self._silent >= GONE_IDLE_TICKS):
            asked = "it does not answer" if unanswered else "its process cannot be seen from here"
            return self._turn(now_s, Cause.HOST_SILENT, f"{self._silence()}, and {asked}")
        if self._local and self._silent >= STARVED_TICKS_MAX:
            return self._turn(now_s, Cause.TOO_LONG, f"{self._silence()}: starved for too long")
        return ()

    def _weigh_mute(self, now_s: float) -> tuple[Effect, ...]:
        """ALIVE, MUTE or PROBATION, of one that beats, at a tick that counts."""
        if not self._answers:
            return ()
        if self._asked is None:
            due = self._mute_busy >= ASK_TICKS or self._mute >= ASK_IDLE_TICKS
            return self._ask() if due else ()
        beat = self._beat if self._beat is not None and _has_work(self._beat) else None
        may_take = round(wedged_after_ms(beat) / 1000 / TICK_S) if beat is not None else 0  # a step goes first
        unanswered = self._unanswered()
        why = f"it beats, but nothing came for {self._mute * TICK_S:.1f} s, not even an answer"
        if self.verdict is Verdict.MUTE:
            ignored = unanswered >= max(DEAF_TICKS, may_take + MUTE_TICKS)
            return self._turn(now_s, Cause.IGNORED, why) if ignored else self._ask()
        mute = self._mute_busy >= max(MUTE_TICKS, may_take) or self._mute >= max(MUTE_IDLE_TICKS, may_take)
        return self._turn(now_s, Cause.UNANSWERED, why) if mute else ()

    def _ask(self) -> tuple[Effect, ...]:
        """Ask it, if it can be, and again every 2 s: an answer may have been lost with a connection."""
        if not self._answers or (self._asked is not None and self._unanswered() % ASK_IDLE_TICKS):
            return ()
        if self._asked is None:
            self._asked = self._ticks
        return (Ask(),)

    def _unanswered(self) -> int:
        """Ticks since it was first asked."""
        return 0 if self._asked is None else self._ticks - self._asked

    def _consider_return(self, now_s: float, beat: Beat, moved: bool) -> tuple[Effect, ...]:
        if self.verdict is Verdict.DEAF:
            return ()
        if self.verdict is not Verdict.WEDGED:
            self._must_step = False
            return self._turn(now_s, Cause.RETURNED, "it beats again")
        if moved:
            self._must_step = False
            return self._turn(now_s, Cause.RETURNED, "its step moves again")
        if _has_work(beat):
            self._idle_since = None
            return ()
        if self._idle_since is None:
            self._idle_since = now_s
        if now_s - self._idle_since < max(WEDGED_REST_S, self._probation_s):
            return ()
        self._must_step = True  # idleness proves nothing about its steps: it stays on probation until one is made
        return self._turn(now_s, Cause.RETURNED, "it has had no work for a while and is tried again")

    def _target(self, cause: Cause) -> Verdict:
        after = TABLE[self.verdict].get(cause)
        if after is None:
            raise LivenessError(f"{self!r}: {cause} cannot happen")
        return after

    def _turn(self, now_s: float, cause: Cause, why: str) -> tuple[Effect, ...]:
        before, after = self.verdict, self._target(cause)
        effects: list[Effect] = []
        if before is not after:
            self.verdict, self.reason = after, why
            effects.append(Judged(before, after, why))
            if after is Verdict.PROBATION:
                self._begin_probation(now_s, fresh=cause is Cause.RETURNED)
            self._owing &= after is not Verdict.ALIVE
            if after in LOST and before not in LOST:
                effects.append(MoveStreams(why))
        probe = self._local and after in PROBED
        if probe is not self._probing:
            self._probing, self._switches = probe, None
            effects.append(StartProbe() if probe else StopProbe())
        return tuple(effects)

    def _begin_probation(self, now_s: float, *, fresh: bool) -> None:
        if fresh:
            flaps = self._returned_at is not None and now_s - self._returned_at <= FLAP_S
            self._probation_s = min(2 * self._probation_s, PROBATION_S_MAX) if flaps else PROBATION_S
            self._returned_at = now_s
        self._owing, self._idle_since = True, None
        self._ticks_served = self._beats = 0
        self._stepped = self._given = False

    def _hear(self) -> None:
        self._silent = self._silent_busy = -1
        self._switches = None

    def _life(self) -> Cause:
        return Cause.LIFE_OWING if self._owing else Cause.LIFE

    def _silence(self) -> str:
        lost = "" if self._connected else "beat connection broken, "
        return f"{lost}silent for {max(0, self._silent) * TICK_S:.1f} s"


def wedged_after_ms(beat: Beat) -> float:
    """How long this worker's step may stand still (facts 31d)."""
    return max(WEDGED_MS_MIN, WEDGED_STEPS * beat.step_ms_p99, beat.budget_ms)


def stopped_reason(probe: ProbeResult) -> str | None:
    """Why this one look proves the process stopped or dead, or None."""
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
