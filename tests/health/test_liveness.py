"""What holds for a worker's liveness, for any order of events: no verdict without its evidence; and stories,
read as text.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the stories' answers anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.health.liveness import (
    DEAF_TICKS,
    LOST,
    PROBED,
    TABLE,
    TICK_S,
    AskOnData,
    Connected,
    DataReceived,
    Disconnected,
    Liveness,
    LivenessCause,
    LivenessChanged,
    LivenessEffect,
    LivenessError,
    LivenessTick,
    MoveLostStreams,
    ProbeResult,
    SetProbing,
    WorkerLiveness,
    stopped_reason,
    wedged_after_ms,
)
from holdfast.wire.messages import Beat
from tests.rigs.transcripts import must_go_as_written, stories


def beat(steps: int = 1, running: int = 1, waiting: int = 0, stuck_ms: float = 0.0, p99: float = 20.0) -> Beat:
    return Beat(1, steps, stuck_ms, p99, 0.0, running, waiting)


beats = st.builds(
    beat,
    steps=st.integers(0, 5),
    running=st.integers(0, 2),
    waiting=st.integers(0, 2),
    stuck_ms=st.sampled_from([0.0, 500.0, 999.0, 1000.0, 5000.0]),
    p99=st.sampled_from([0.0, 20.0, 400.0]),
)
looks = st.builds(
    ProbeResult,
    gone=st.just(False),
    state=st.sampled_from("SRDT"),
    frozen=st.booleans(),
    thread_state=st.sampled_from("SRD"),
    switches=st.integers(0, 3),
)
# Gaps between ticks: on time mostly, late, or in a burst.
ticks = st.tuples(st.sampled_from([0.1, 0.1, 0.1, 0.12, 0.01, 0.5, 3.0]), st.booleans())
events = st.one_of(
    st.tuples(st.just("tick"), ticks),
    st.tuples(st.just("tick"), ticks),
    st.tuples(st.just("quiet"), st.integers(1, 120)),  # that many on-time ticks
    st.tuples(st.just("beat"), beats),
    st.tuples(st.just("probe"), looks),
    st.tuples(st.just("traffic"), st.none()),
    st.tuples(st.just("connect"), st.booleans()),
    st.tuples(st.just("disconnect"), st.none()),
)


class Observer:
    """Feeds a `WorkerLiveness`, and keeps its own account of the evidence it gave."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.liveness = WorkerLiveness("w")
        self.now = 0.0
        self.connected = False
        self.local = False
        self.quiet_s = 0.0  # on-time silence, generously counted
        self.mute_s = 0.0  # the same of all but beats
        self.asked_s: float | None = None  # how much of that was there when it was first asked
        self.looks: list[ProbeResult] = []
        self.still_s = 0.0  # on-time, since looks at the beat thread last differed or showed it runnable
        self.beat: Beat | None = None

    def feed(self, kind: str, value: object) -> None:
        if kind == "quiet":
            assert isinstance(value, int)
            for _ in range(value):
                self.feed("tick", (0.1, True))
            return
        before = self.liveness.state
        effects = self.apply(kind, value)
        if AskOnData() in effects:
            assert not self.local
            self.asked_s = self.mute_s if self.asked_s is None else self.asked_s
        self.check(before, effects)

    def apply(self, kind: str, value: object) -> tuple[LivenessEffect, ...]:
        if kind == "tick":
            gap, streams_open = value  # type: ignore[misc]
            self.now += gap
            self.quiet_s += 0.1 if gap <= 0.2 else 0.0
            self.still_s += 0.1 if gap <= 0.2 else 0.0
            self.mute_s += 0.1 if gap <= 0.2 else 0.0
            return self.liveness.step(LivenessTick(streams_open), self.now)
        if kind == "probe":
            assert isinstance(value, ProbeResult)
            if not self.looks or value.switches != self.looks[-1].switches or value.thread_state == "R":
                self.still_s = 0.0
            self.looks.append(value)
            return self.liveness.step(value, self.now)
        if kind in ("connect", "disconnect"):
            if self.connected is (kind == "connect"):
                return ()
            self.connected = not self.connected
            if self.connected:
                self.local, self.quiet_s = bool(value), 0.0
                return self.liveness.step(Connected(self.local, answers=self.answers), self.now)
            return self.liveness.step(Disconnected(), self.now)
        if kind == "beat" and not self.connected:
            return ()
        self.quiet_s, self.looks = 0.0, []
        if kind == "traffic":
            self.mute_s, self.asked_s = 0.0, None
            return self.liveness.step(DataReceived(), self.now)
        assert isinstance(value, Beat)
        self.beat = value
        return self.liveness.step(value, self.now)

    def check(self, before: Liveness, effects: tuple[LivenessEffect, ...]) -> None:
        for effect in effects:
            if not isinstance(effect, LivenessChanged):
                continue
            assert effect.before is before
            assert effect.after is self.liveness.state
            assert effect.after in TABLE[effect.before].values()
            self.check_evidence(effect.after)
        moved = any(isinstance(e, MoveLostStreams) for e in effects)
        assert moved == (self.liveness.state in LOST and before not in LOST)

    def check_evidence(self, after: Liveness) -> None:
        if after is Liveness.STOPPED:
            assert self.local
            proved = bool(self.looks) and stopped_reason(self.looks[-1]) is not None
            assert proved or self.still_s > 0.45 or self.quiet_s > 9.9
        elif after is Liveness.WEDGED:
            assert self.beat is not None
            assert self.beat.running + self.beat.waiting > 0
            assert self.beat.stuck_ms >= wedged_after_ms(self.beat)
        elif after is Liveness.GONE:
            assert not self.local
            ignored = self.asked_s is not None and self.mute_s - self.asked_s > 0.45
            assert self.quiet_s > (1.0 if ignored else 1.4)
        elif after in (Liveness.MUTE, Liveness.DEAF):
            assert not self.local
            assert self.answers
            assert self.asked_s is not None
            assert self.mute_s > 0.9
            assert after is Liveness.MUTE or self.mute_s - self.asked_s > DEAF_TICKS * TICK_S - 0.15


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=60), st.booleans(), st.booleans())
def test_no_verdict_without_its_evidence(story: list[tuple[str, object]], local: bool, answers: bool) -> None:
    """In whatever order things happen, STOPPED, WEDGED, GONE, MUTE and DEAF rest on what was seen; streams move once
    each."""
    observer = Observer(answers=answers)
    observer.feed("connect", local)
    for kind, value in story:
        observer.feed(kind, value)
        assert observer.liveness._probing == (observer.local and observer.liveness.state in PROBED)
        assert observer.liveness.routable == (observer.liveness.admit_max != 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.15, 0.25, 0.7, 2.0]), st.integers(0, 3)), max_size=120))
def test_slow_and_starved_is_never_dead(story: list[tuple[float, int]]) -> None:
    """Late beats, late ticks and a beat thread that is runnable never move a stream, short of 10 s of silence."""
    liveness = WorkerLiveness("w")
    now, quiet_ticks = 0.0, 0
    effects = list(liveness.step(Connected(True), now))
    for gap, dice in story:
        now += gap
        quiet_ticks += 1
        if dice == 0 or quiet_ticks > 90:
            quiet_ticks = 0
            effects += liveness.step(beat(steps=0, stuck_ms=999.0), now)
        effects += liveness.step(LivenessTick(True), now)
        thread_state, switches = ("R", 7) if dice != 1 else ("S", int(now * 10))
        effects += liveness.step(ProbeResult(False, "S", False, thread_state, switches), now)
    assert not [e for e in effects if isinstance(e, MoveLostStreams)]
    assert liveness.state not in LOST


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.21, 0.5, 1.0, 10.0]), max_size=200), st.booleans())
def test_a_starved_observer_accuses_nobody(gaps: list[float], local: bool) -> None:
    """Ticks that are late, or made up for in a burst, make no suspect."""
    liveness = WorkerLiveness("w")
    liveness.step(Connected(local), 0.0)
    now = 0.0
    for gap in gaps:
        now += gap
        assert liveness.step(LivenessTick(True), now) == ()
    assert liveness.state is Liveness.ALIVE


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=40), st.sampled_from([20.0, 2000.0]))
def test_slow_but_answering_is_never_confirmed(story: list[tuple[bool, int]], p99: float) -> None:
    """On another host, however long its tokens take: a worker that answers a question within two seconds, the latest
    that a swamped one was seen to, loses no stream."""
    liveness = WorkerLiveness("w")
    liveness.step(Connected(False, answers=True), 0.0)
    now, due = 0.0, -1
    effects: list[LivenessEffect] = []
    for open_, late in story:
        for tick in range(30):
            now += 0.1
            if tick % 2:
                effects += liveness.step(beat(steps=int(now), p99=p99), now)
            due -= 1
            if due == 0:
                effects += liveness.step(DataReceived(), now)
            told = liveness.step(LivenessTick(open_), now)
            if AskOnData() in told and due < 0:
                due = late + 1
            effects += told
    assert not [effect for effect in effects if isinstance(effect, MoveLostStreams)]


def test_every_verdict_can_be_left() -> None:
    """From every verdict there is a way back to ALIVE (facts 14)."""
    reach = {Liveness.ALIVE}
    for _ in Liveness:
        reach |= {v for v, row in TABLE.items() if reach & set(row.values())}
    assert reach == set(Liveness)


@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (ProbeResult(gone=True), "gone"),
        (ProbeResult(False, "T", False, "T"), "stopped (state T)"),
        (ProbeResult(False, "t", False, "S"), "stopped (state t)"),
        (ProbeResult(False, "Z", False, ""), "dead (state Z)"),
        (ProbeResult(False, "S", True, "S"), "frozen"),
        (ProbeResult(False, "S", False, "T"), "stopped (state T)"),
        (ProbeResult(False, "S", False, "S"), None),
        (ProbeResult(False, "R", False, "R"), None),
        (ProbeResult(False, "D", False, "D"), None),
        (ProbeResult(False, "S", False, ""), None),
    ],
)
def test_what_one_look_proves(look: ProbeResult, reason: str | None) -> None:
    """A single look proves a stop only by a stopped, dead or frozen process; sleep and disk waits prove nothing."""
    found = stopped_reason(look)
    assert (found is None) if reason is None else (found is not None and reason in found)


@pytest.mark.parametrize(
    ("sent", "limit_ms"),
    [
        (Beat(1, 1, 0.0, 0.0, 0.0, 1, 0), 1000.0),
        (Beat(1, 1, 0.0, 60.0, 0.0, 1, 0), 1800.0),
        (Beat(1, 1, 0.0, 60.0, 5000.0, 1, 0), 5000.0),
    ],
)
def test_how_long_a_step_may_stand_still(sent: Beat, limit_ms: float) -> None:
    """The largest of one second, thirty slow steps and the declared budget."""
    assert wedged_after_ms(sent) == limit_ms


def test_a_late_probe_answer_is_ignored() -> None:
    """A look that was taken while the worker was doubted says nothing once it beats again."""
    liveness = WorkerLiveness("w")
    liveness.step(Connected(True), 0.0)
    assert SetProbing(True) in liveness.step(Disconnected(), 0.1)
    liveness.step(Connected(True), 0.2)
    assert SetProbing(False) in liveness.step(beat(), 0.3)
    assert liveness.step(ProbeResult(gone=True), 0.4) == ()
    assert liveness.state is Liveness.ALIVE


def test_data_without_a_beat_connection_is_life_too() -> None:
    """A beat thread that seems to stand still is no proof against a worker that sends data meanwhile."""
    liveness = WorkerLiveness("w")
    liveness.step(Connected(True), 0.0)
    liveness.step(LivenessTick(True), 0.1)
    liveness.step(Disconnected(), 0.1)
    for tick in range(2, 40):
        liveness.step(LivenessTick(True), tick / 10)
        liveness.step(DataReceived(), tick / 10)
        liveness.step(ProbeResult(False, "S", False, "S", 5), tick / 10)
    assert liveness.state is Liveness.SUSPECT


def test_the_table_refuses_what_is_not_in_it() -> None:
    """A missing entry is an error, and the verdict stays."""
    liveness = WorkerLiveness("w")
    with pytest.raises(LivenessError, match="proved cannot happen"):
        liveness._target(LivenessCause.PROVED)
    assert liveness.state is Liveness.NEW


# -- stories, read as text: `> command` lines are what happens, the rest is what it answered


class Story:
    """Plays commands against a `WorkerLiveness`, on time it makes up itself."""

    def __init__(self) -> None:
        self.liveness = WorkerLiveness("worker-1")
        self.now = 0.0
        self.lines: list[str] = []
        self.probing = False
        self.process = ProbeResult(gone=False, state="S", thread_state="S", switches=1)
        self.switching = False
        self.beat = dict.fromkeys(Beat.__struct_fields__, 0)

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, *words = command.split()
        flags = [w for w in words if "=" not in w]
        values = {k: v for k, _, v in (w.partition("=") for w in words if "=" in w)}
        try:
            getattr(self, f"do_{word}")(flags, values)
        except LivenessError as error:
            self.lines.append(f"  {self.now:5.1f}  refused: {error}")
        return self.lines

    def take(self, effects: tuple[LivenessEffect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, LivenessChanged):
                text = f"{effect.before} -> {effect.after}: {effect.reason}"
            elif isinstance(effect, MoveLostStreams):
                text = "move streams"
            elif isinstance(effect, AskOnData):
                text = "ask"
            else:
                self.probing = effect.on
                text = "start probe" if self.probing else "stop probe"
            self.lines.append(f"  {self.now:5.1f}  {text}")
            if isinstance(effect, SetProbing) and effect.on:
                self.probe()

    def probe(self) -> None:
        self.take(self.liveness.step(self.process, self.now))

    def do_connect(self, flags: list[str], values: dict[str, str]) -> None:
        self.take(self.liveness.step(Connected("local" in flags, "answers" in flags), self.now))

    def do_disconnect(self, flags: list[str], values: dict[str, str]) -> None:
        self.take(self.liveness.step(Disconnected(), self.now))

    def do_process(self, flags: list[str], values: dict[str, str]) -> None:
        """What a probe would see from now on; `switching`: the beat thread wakes and sleeps."""
        self.switching = "switching" in flags
        self.process = ProbeResult(
            gone="gone" in flags,
            state=values.get("state", "S"),
            frozen="frozen" in flags,
            thread_state=values.get("thread", values.get("state", "S")),
            switches=self.process.switches,
        )

    def do_ticks(self, flags: list[str], values: dict[str, str]) -> None:
        """On-time ticks for so many seconds; `beats=0.2` with beats that far apart, `open`: streams are open here."""
        every = round(float(values.get("beats", "0")) / TICK_S)
        for index in range(round(float(flags[0]) / TICK_S)):
            self.now = round(self.now + TICK_S, 3)
            if every and index % every == every - 1:
                self.send_beat(values)
            if self.switching:
                switches = self.process.switches + 1
                self.process = ProbeResult(False, "S", False, self.process.thread_state, switches)
            self.take(self.liveness.step(LivenessTick("open" in flags), self.now))
            if self.probing:
                self.probe()

    def do_late(self, flags: list[str], values: dict[str, str]) -> None:
        """One tick that comes after so many seconds."""
        self.now = round(self.now + float(flags[0]), 3)
        self.take(self.liveness.step(LivenessTick("open" in flags), self.now))
        if self.probing:
            self.probe()

    def do_beat(self, flags: list[str], values: dict[str, str]) -> None:
        self.send_beat(values)

    def send_beat(self, values: dict[str, str]) -> None:
        """`steps=+2` moves the count by two with every beat; other numbers stay as last given."""
        steps = self.beat["steps"] + int(values.get("steps", "0"))
        self.beat |= {k: int(v) for k, v in values.items() if k in self.beat}
        self.beat |= {"steps": steps, "count": self.beat["count"] + 1}
        self.take(self.liveness.step(Beat(**self.beat), self.now))

    def do_traffic(self, flags: list[str], values: dict[str, str]) -> None:
        self.take(self.liveness.step(DataReceived(), self.now))

    def do_status(self, flags: list[str], values: dict[str, str]) -> None:
        routable = "routable" if self.liveness.routable else "not routable"
        self.lines.append(f"  {self.now:5.1f}  {self.liveness.state}, {routable}, admit {self.liveness.admit_max}")


@stories("liveness", least=7)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every transcript's answers are exactly those that `WorkerLiveness` gives."""
    must_go_as_written(path, Story)
