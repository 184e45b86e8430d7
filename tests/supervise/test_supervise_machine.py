"""The restart policy, without a process: what happens to a life, what is done about it, and its stories.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.spec.jobs import Probes
from holdfast.supervise import machine as m
from holdfast.supervise.machine import Life, Phase, Policy, Restart, step
from holdfast.supervise.probes import Answer, Asked, weigh
from transcript_book import must_go_as_written, transcripts


def grow(*events: tuple[float, m.Event]) -> tuple[Life, list[m.Effect]]:
    """A life after events at given times, and every effect on the way."""
    life, done = Life(), []
    for at_s, event in events:
        life, effects = step(life, event, at_s)
        done += effects
    return life, done


STARTED = ((0.0, m.Start()), (0.0, m.Spawned(11)))
READY = (*STARTED, (0.5, m.BecameReady()))


def test_a_start_leads_to_ready() -> None:
    """A started process is spawned once, and is ready when its record says so."""
    life, done = grow(*READY)
    assert (life.phase, life.pid) == (Phase.READY, 11)
    assert done == [m.Spawn(), m.Tell("is ready, pid 11, after 0.50 s")]


def test_the_first_restart_is_immediate() -> None:
    """A process that ends unasked is started again in the same step, without a pause."""
    life, done = grow(*READY, (5.0, m.Exited("SIGKILL")), (5.0, m.Spawned(12)), (5.4, m.BecameReady()))
    assert life.phase is Phase.READY
    assert done[2:] == [
        m.Fell(11, "SIGKILL", was_ready=True),
        m.Tell("died (SIGKILL); starting it again"),
        m.Spawn(),
        m.Tell("is back as pid 12, after 0.40 s"),
    ]


def test_further_restarts_back_off() -> None:
    """Pauses double from 0.1 s to 10 s while lives stay short, and the reason is there to be read."""
    life, _ = grow(*STARTED)
    now_s, pauses = 0.0, []
    for _ in range(12):
        life, _ = step(life, m.Exited("exited with 1: no such model"), now_s)
        if life.phase in (Phase.BACKING_OFF, Phase.CRASH_LOOP):
            assert life.deadline_s is not None
            assert str(life).endswith(", exited with 1: no such model)")
            pauses.append(round(life.deadline_s - now_s, 3))
            now_s = life.deadline_s
            life, effects = step(life, m.Tick(), now_s)
            assert effects == (m.Spawn(),)
        life, _ = step(life, m.Spawned(1), now_s)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0]


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


def test_pauses_never_overflow() -> None:
    """However often it has failed, the pause is the greatest one."""
    assert m.pause_s(1_000_000) == m.PAUSE_S_MAX


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


def test_the_startup_bound() -> None:
    """Not ready in time is killed; ready in time is never asked again; without a bound it may take for ever."""
    late = Life(policy=Policy(startup_s=120.0))
    late, _ = step(late, m.Start(), 0.0)
    late, _ = step(late, m.Spawned(5), 0.0)
    assert late.deadline_s == 120.0
    assert step(late, m.Tick(), 119.9) == (late, ())
    killed, effects = step(late, m.Tick(), 120.0)
    assert (killed.phase, effects[-1]) == (Phase.KILLED, m.Kill())
    ready, _ = step(late, m.BecameReady(), 3.0)
    assert ready.deadline_s is None
    unbounded, _ = grow(*STARTED)
    assert unbounded.deadline_s is None


def test_an_adopted_one_that_is_not_ready_has_the_bound_too() -> None:
    """The next supervisor gives it the whole bound again, and no more."""
    life, _ = step(Life(policy=Policy(startup_s=7.0)), m.Adopted(4, ready=False), 100.0)
    assert (life.phase, life.deadline_s) == (Phase.STARTING, 107.0)
    ready, _ = step(Life(policy=Policy(startup_s=7.0)), m.Adopted(4, ready=True), 100.0)
    assert (ready.phase, ready.deadline_s) == (Phase.READY, None)


def test_one_that_does_not_end_is_called_so_and_never_doubled() -> None:
    """Past the kernel's bound it is unkillable; nothing is spawned beside it; its end brings the next."""
    life, _ = grow(*READY, (9.0, m.Condemned("is stopped")))
    assert step(life, m.Tick(), 9.0 + m.KERNEL_S - 0.1) == (life, ())
    stuck, effects = step(life, m.Tick(), 9.0 + m.KERNEL_S)
    assert stuck.phase is Phase.UNKILLABLE
    assert effects == (m.Tell("failover impossible here: pid 11 does not end after SIGKILL"),)
    over, effects = step(step(stuck, m.Stop(1.0), 20.0)[0], m.Exited("SIGKILL"), 21.0)
    assert (over.phase, m.Spawn() in effects) == (Phase.OVER, False)
    back, effects = step(stuck, m.Exited("SIGKILL"), 21.0)
    assert (back.phase, effects[-1]) == (Phase.STARTING, m.Spawn())


@pytest.mark.parametrize(("failures", "phase"), [(3, Phase.BACKING_OFF), (4, Phase.CRASH_LOOP), (40, Phase.CRASH_LOOP)])
def test_a_crash_loop_is_called_one(failures: int, phase: Phase) -> None:
    """From the fifth failure in a row on, with how often, the last words, and a next try within the longest pause."""
    life = Life(Phase.STARTING, pid=3, failures=failures)
    after, _ = step(life, m.Exited("exited with 7: no such model"), 1.0)
    assert (after.phase, after.failures) == (phase, failures + 1)
    assert after.deadline_s is not None
    assert after.deadline_s <= 1.0 + m.PAUSE_S_MAX
    if phase is Phase.CRASH_LOOP:
        assert after.note == f"failed {failures + 1} times in a row, exited with 7: no such model"
        again, effects = step(after, m.Tick(), after.deadline_s)
        assert (again.phase, effects) == (Phase.STARTING, (m.Spawn(),))


@pytest.mark.parametrize(
    ("restart", "clean", "comes_back"),
    [
        (Restart.ALWAYS, True, True),
        (Restart.ALWAYS, False, True),
        (Restart.ON_FAILURE, True, False),
        (Restart.ON_FAILURE, False, True),
        (Restart.NEVER, True, False),
        (Restart.NEVER, False, False),
    ],
)
def test_the_restart_policy(restart: Restart, clean: bool, comes_back: bool) -> None:
    """A kubelet's three words."""
    life = Life(Phase.READY, pid=3, policy=Policy(restart))
    after, effects = step(life, m.Exited("exited", clean=clean), 100.0)
    assert after.phase is (Phase.STARTING if comes_back else Phase.OVER)
    assert (m.Spawn() in effects) is comes_back


def test_no_phase_spawns_beside_a_process() -> None:
    """Whatever happens in any phase that has a process, only its end can lead to a new one."""
    events: list[m.Event] = [m.Tick(), m.Stop(1.0), m.KillNow(), m.Replace(1.0), m.Condemned("x"), m.BecameReady()]
    for phase in (Phase.STARTING, Phase.READY, Phase.KILLED, Phase.UNKILLABLE, Phase.STOPPING):
        for event in events:
            if (phase, type(event)) not in m.TABLE:
                continue
            life = Life(phase, pid=3, deadline_s=0.0, policy=Policy(startup_s=1.0))
            assert m.Spawn() not in step(life, event, 100.0)[1], (phase, event)


TRANSCRIPTS = transcripts("supervise")


class Story:
    """One process and its supervisor's machine, on time it makes up itself."""

    def __init__(self) -> None:
        self.probes = Probes()
        self.life = Life(policy=Policy(startup_s=self.probes.startup_s))
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

    def do_restart(self, rest: str) -> None:
        self.life = replace(self.life, policy=replace(self.life.policy, restart=rest))

    def do_start(self, _: str) -> None:
        self._happens(m.Start())

    def do_ready(self, _: str) -> None:
        self._happens(m.BecameReady())

    def do_judged(self, rest: str) -> None:
        self._happens(m.Condemned(rest))

    def do_exit(self, rest: str) -> None:
        self._happens(m.Exited(rest, clean=rest == "exited with 0"))

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


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_story_goes_as_written(path: Path) -> None:
    """Replaying the events gives the same actions, line for line."""
    must_go_as_written(path, Story)


def test_the_stories_are_there() -> None:
    """A folder without stories would pass silently."""
    assert len(TRANSCRIPTS) >= 4
