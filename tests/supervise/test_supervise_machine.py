"""The restart machine, without a process: what happens to a life, what answers mean, what is done, and its stories.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spec.launch import Probes
from holdfast.supervise import machine as m
from holdfast.supervise.machine import Answer, Asked, Life, Phase, answer_of, step, weigh
from tests.rigs.transcripts import must_go_as_written, stories


def grow(*events: tuple[float, m.Event]) -> tuple[Life, list[m.Effect]]:
    """A life after events at given times, and every effect on the way."""
    life, done = Life(), []
    for at_s, event in events:
        life, effects = step(life, event, at_s)
        done += effects
    return life, done


STARTED = ((0.0, m.Start()), (0.0, m.Spawned(11)))
READY = (*STARTED, (0.5, m.BecameReady()))


def test_a_steady_life_forgets_failures() -> None:
    """Ready for as long as it took to get there, and two seconds: the next restart is immediate again; not before."""
    for took_s, enough_s in ((30.0, 30.0), (0.5, m.STEADY_S)):
        life = Life(Phase.READY, pid=9, started_s=0.0, ready_s=took_s, failures=7, was_ready=True)
        short, _ = step(life, m.Exited("SIGSEGV"), took_s + enough_s - 0.1)
        steady, _ = step(life, m.Exited("SIGSEGV"), took_s + enough_s)
        assert (short.phase, short.failures) == (Phase.CRASH_LOOP, 8)
        assert (steady.phase, steady.failures) == (Phase.STARTING, 1)
    slow, _ = step(Life(Phase.STARTING, pid=9, started_s=0.0, failures=7), m.Exited("SIGSEGV"), 500.0)
    assert (slow.phase, slow.failures) == (Phase.CRASH_LOOP, 8)


def test_stopping_is_bounded() -> None:
    """SIGTERM first; SIGKILL when the bound has passed and not before."""
    life, done = grow(*READY, (10.0, m.Stop(3.0)))
    assert (life.phase, life.deadline_s, done[-1]) == (Phase.STOPPING, 13.0, m.Terminate())
    early, effects = step(life, m.Tick(), 12.9)
    assert (early, effects) == (life, ())
    late, effects = step(life, m.Tick(), 13.0)
    assert m.Kill() in effects
    assert (late.phase, late.deadline_s) == (Phase.KILLED, 13.0 + m.KERNEL_S)
    over, _ = step(late, m.Exited("SIGKILL"), 13.1)
    assert over.phase is Phase.OVER


def test_a_replaced_process_comes_back() -> None:
    """One that was asked to leave for new settings is spawned again; one told to stop meanwhile is not."""
    life, _ = grow(*READY, (10.0, m.Replace(3.0)))
    again, effects = step(life, m.Exited("exited with 0"), 10.2)
    assert (again.phase, effects) == (Phase.STARTING, (m.Spawn(),))
    stopped, _ = step(life, m.Stop(3.0), 10.1)
    over, effects = step(stopped, m.Exited("exited with 0"), 10.2)
    assert over.phase is Phase.OVER
    assert m.Spawn() not in effects


@pytest.mark.parametrize("phase", list(Phase))
def test_everything_can_be_stopped_and_killed(phase: Phase) -> None:
    """Whatever a process is doing, `Stop` and `KillNow` are understood and never spawn."""
    for event in (m.Stop(1.0), m.KillNow()):
        life, effects = step(Life(phase, pid=3), event, 1.0)
        assert life.phase in (Phase.STOPPING, Phase.KILLED, Phase.UNKILLABLE, Phase.OVER)
        assert not life.wanted or phase is Phase.OVER
        assert m.Spawn() not in effects


def test_what_is_not_in_the_table_is_a_bug() -> None:
    """An event that cannot happen is refused loudly."""
    with pytest.raises(AssertionError, match="BecameReady while over"):
        step(Life(Phase.OVER), m.BecameReady(), 0.0)


# -- condemned, late, crash-looping, not restarted


@pytest.mark.parametrize("events", [STARTED, READY], ids=["starting", "ready"])
def test_a_condemned_process_is_killed_and_comes_back(events: tuple[tuple[float, m.Event], ...]) -> None:
    """Killed once, with the reason told; after its end it is started like one that died."""
    life, done = grow(*events, (9.0, m.Condemned("is stopped: state T")))
    assert life.phase is Phase.KILLED
    assert done[-2:] == [m.Tell("is stopped: state T; killing pid 11"), m.Kill()]
    back, effects = step(life, m.Exited("SIGKILL"), 9.1)
    assert (back.phase, back.failures) == (Phase.STARTING, 1)
    fell = m.Fell(11, "killed: it is stopped: state T", was_ready=events is READY)
    assert effects == (fell, m.Tell("died (killed: it is stopped: state T); starting it again"), m.Spawn())


def test_an_adopted_one_that_is_not_ready_has_the_bound_too() -> None:
    """The next supervisor gives it the whole bound again, and no more; who has none may take for ever to be ready."""
    assert grow(*STARTED)[0].deadline_s is None
    life, _ = step(Life(startup_s=7.0), m.Adopted(4, ready=False), 100.0)
    assert (life.phase, life.deadline_s) == (Phase.STARTING, 107.0)
    ready, _ = step(Life(startup_s=7.0), m.Adopted(4, ready=True), 100.0)
    assert (ready.phase, ready.deadline_s) == (Phase.READY, None)


def test_no_phase_spawns_beside_a_process() -> None:
    """Whatever happens in any phase that has a process, only its end can lead to a new one."""
    events: list[m.Event] = [m.Tick(), m.Stop(1.0), m.KillNow(), m.Replace(1.0), m.Condemned("x"), m.BecameReady()]
    for phase in (Phase.STARTING, Phase.READY, Phase.KILLED, Phase.UNKILLABLE, Phase.STOPPING):
        for event in events:
            if (phase, type(event)) not in m.TABLE:
                continue
            life = Life(phase, pid=3, deadline_s=0.0, startup_s=1.0)
            assert m.Spawn() not in step(life, event, 100.0)[1], (phase, event)


# -- what answers to probes mean

PROBES = Probes(failure_threshold=3)
WORDS = {"y": Answer.YES, "n": Answer.NO, ".": Answer.SILENCE}


def condemned_at(conversation: str, probes: Probes = PROBES) -> list[int]:
    """After which answers to /live the process is condemned; `y`es, `n`o, or `.` for silence."""
    asked, when = Asked(), []
    for place, letter in enumerate(conversation, 1):
        asked, why = weigh(asked, WORDS[letter], Answer.NO, probes)
        if why:
            when.append(place)
    return when


@pytest.mark.parametrize(
    ("conversation", "condemned"),
    [
        ("yyyy", []),
        ("nn", []),
        ("nnn", [3]),
        ("nnnnnn", [3]),  # once; it is being killed
        ("nnynn", []),
        ("nnynnn", [6]),
        ("........", []),
        ("nn......", []),
        ("n.n.n", [5]),  # silence between proves nothing either way
        ("nn.y.n", []),
    ],
)
def test_refusals_in_a_row(conversation: str, condemned: list[int]) -> None:
    """Only explicit refusals count, a yes forgives them, and silence is no answer."""
    assert condemned_at(conversation) == condemned


@given(st.text(alphabet="yn.", max_size=60), st.integers(1, 5))
def test_silence_could_be_left_out(conversation: str, threshold: int) -> None:
    """Whoever is condemned would have been without the silences too, and the other way round."""
    probes = Probes(failure_threshold=threshold)
    spoken = conversation.replace(".", "")
    assert len(condemned_at(conversation, probes)) == len(condemned_at(spoken, probes))


@pytest.mark.parametrize("ready", list(Answer))
def test_readiness_is_shown_and_condemns_nobody(ready: Answer) -> None:
    """However /health answers, a live process stays."""
    asked = Asked()
    for _ in range(100):
        asked, why = weigh(asked, Answer.YES, ready, PROBES)
        assert not why
    assert str(asked) == {Answer.YES: "ready", Answer.NO: "not ready", Answer.SILENCE: "silent"}[ready]


def test_codes_as_answers() -> None:
    """200 is yes, any other code no, and no code silence."""
    assert [answer_of(code) for code in (200, 204, 503, 404, None)] == [
        Answer.YES,
        Answer.NO,
        Answer.NO,
        Answer.NO,
        Answer.SILENCE,
    ]


# -- stories


class Story:
    """One process and its supervisor's machine, on time it makes up itself."""

    def __init__(self) -> None:
        self.probes = Probes()
        self.life = Life(startup_s=self.probes.startup_s)
        self.asked = Asked()
        self.reason = ""
        self.now_s = 0.0
        self.pid = 100
        self.lines: list[str] = []

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, _, rest = command.partition(" ")
        getattr(self, f"do_{word}")(rest)
        return self.lines

    def _happens(self, event: m.Event) -> None:
        self.life, effects = step(self.life, event, self.now_s)
        for effect in effects:
            text = effect.text if isinstance(effect, m.Tell) else f"({type(effect).__name__.lower()})"
            self.lines.append(f"  {self.now_s:7.1f}  {text}")
            if isinstance(effect, m.Spawn):
                self.pid += 1
                self.asked = Asked()
                self._happens(m.Spawned(self.pid))

    def do_start(self, _: str) -> None:
        self._happens(m.Start())

    def do_ready(self, _: str) -> None:
        self._happens(m.BecameReady())

    def do_judged(self, rest: str) -> None:
        self._happens(m.Condemned(rest))

    def do_exit(self, rest: str) -> None:
        self._happens(m.Exited(rest))

    def do_refuse(self, rest: str) -> None:
        self._happens(m.Exited(rest, refused=True))

    def do_stop(self, rest: str) -> None:
        self._happens(m.Stop(float(rest)))

    def do_because(self, rest: str) -> None:
        """What its refusals give as their reason from now on."""
        self.reason = rest

    def do_live(self, rest: str) -> None:
        """Answers to /live, a second apart: 200, 503 or nothing."""
        for word in rest.split():
            self.do_wait(str(self.probes.period_s))
            answer = {"200": Answer.YES, "503": Answer.NO, "nothing": Answer.SILENCE}[word]
            self.asked, why = weigh(self.asked, answer, answer, self.probes, self.reason)
            if why and self.life.phase is Phase.READY:
                self._happens(m.Condemned(why))

    def do_wait(self, rest: str) -> None:
        """Let time pass, with every tick that falls due."""
        until_s = self.now_s + float(rest)
        while self.life.deadline_s is not None and self.life.deadline_s <= until_s:
            self.now_s = self.life.deadline_s
            self._happens(m.Tick())
        self.now_s = until_s

    def do_status(self, _: str) -> None:
        self.lines.append(f"  {self.now_s:7.1f}  {self.life}; {self.asked}; pid {self.life.pid}")


@stories("supervise", least=4)
def test_the_story_goes_as_written(path: Path) -> None:
    """Replaying the events gives the same actions, line for line."""
    must_go_as_written(path, Story)
