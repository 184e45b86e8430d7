"""Stories of one worker's breaker and standing, and of the pace of a set, read as text: `> command` lines are what
happens, the rest is what came of it. Those of canaries are beside those of all workers together, in tests/control.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from holdfast.core.ports import DeadlineReached
from holdfast.health import breaker as b
from holdfast.health import standing as s
from holdfast.health.breaker import Breaker, FailureKind
from holdfast.health.device_faults import parse_line
from holdfast.health.liveness import Liveness, LivenessChanged
from holdfast.health.outliers import Outliers, PaceClass, Paced
from holdfast.health.standing import WorkerStanding
from tests.rigs.transcripts import must_go_as_written, stories


class WorkerStory:
    """One worker's breaker and standing, coupled as whoever keeps them couples them, on time it makes up itself."""

    def __init__(self) -> None:
        self.breaker = Breaker("worker-1", jitter=lambda: 0.5)
        self.standing = WorkerStanding()
        self.now = 100.0
        self.out: list[int] = []  # canaries that the breaker asked for
        self.lines: list[str] = []

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, _, rest = command.partition(" ")
        getattr(self, f"do_{word}")(rest)
        return self.lines

    def say(self, text: str) -> None:
        self.lines.append(f"  {self.now:6.1f}  {text}")

    def tell_breaker(self, event: b.BreakerEvent) -> None:
        for effect in self.breaker.step(event, self.now):
            match effect:
                case b.BreakerOpened():
                    self.say(f"breaker opens for {effect.pause_s:g} s: {effect.reason}")
                    self.tell(effect)
                case b.SendTrialCanary():
                    self.out.append(effect.number)
                    self.say(f"breaker asks for canary {effect.number}")
                case b.BreakerClosed():
                    self.say(f"breaker closes: {effect.reason}")
                    self.tell(effect)

    def tell(self, event: s.StandingEvent) -> None:
        self.standing, effects = s.step(self.standing, event, self.now)
        for effect in effects:
            match effect:
                case s.SetWeight():
                    self.say(f"{effect.status.name}, weight {effect.weight:g}: {effect.reason}")
                case s.Quarantine():
                    self.say(f"quarantine; good until {effect.right_s:g}")
                case s.MoveEjectedStreams():
                    self.say(f"move streams (ejection {effect.number})")
                case s.DrainWorker():
                    self.say("drain")
                case s.CheckWorkerNow():
                    self.say(f"ask for a canary: {effect.reason}")
                case s.HealthNote():
                    self.say(f"note: {effect.reason}")

    def do_present(self, rest: str) -> None:
        """`present 1 serving`: the worker is there with its first load."""
        load, *serving = rest.split()
        if int(load) > self.standing.load:
            self.tell_breaker(b.Renewed())
        self.tell(s.WorkerPresent(int(load), bool(serving)))

    def do_attempts(self, rest: str) -> None:
        """`attempts ok=10 stalled=1`"""
        counts = {name.replace("_", " "): int(count) for name, _, count in (w.partition("=") for w in rest.split())}
        succeeded = counts.pop("ok", 0)
        self.tell_breaker(b.Attempts(succeeded, {FailureKind(name): count for name, count in counts.items()}))

    def do_ended(self, rest: str) -> None:
        """`ended InvalidRequest 0`, `ended - 0 stop`: an attempt's end, and whether it is the worker's fault."""
        code, tokens, *finish = rest.split()
        kind = b.classify_failure(
            None if code == "-" else code, tokens=int(tokens), finish=finish[0] if finish else None
        )
        self.say("not its fault" if kind is None else f"its fault: {kind}")
        if kind is not None:
            self.tell_breaker(b.Attempts(failed={kind: 1}))

    def do_canary(self, rest: str) -> None:
        """`canary passed`, `canary no answer`, `canary no answer (moving)`, `canary wrong`; `… asked 120`: earlier."""
        how, _, asked = rest.partition(" asked ")
        asked_at_s = float(asked) if asked else self.now
        load = self.standing.load
        passed = how == "passed"
        if passed:
            self.tell(s.CanaryPassed(load, asked_at_s))
        else:
            failing = s.CanaryFailing(how.removesuffix(" (moving)"))
            self.tell(s.CanaryFailed(load, asked_at_s, failing, "as the story wants", how.endswith("(moving)")))
        while self.out:
            self.tell_breaker(b.CanaryAnswered(self.out.pop(), passed))

    def do_wait(self, rest: str) -> None:
        """So many seconds, with every tick that becomes due."""
        until = self.now + float(rest)
        while True:
            dues = (self.breaker.next_deadline_s, s.next_deadline_s(self.standing))
            due = min((due for due in dues if due is not None), default=until + 1)
            if due > until:
                break
            self.now = max(due, self.now)
            self.tell_breaker(DeadlineReached())
            self.tell(DeadlineReached())
        self.now = until

    def do_judged(self, rest: str) -> None:
        verdict, _, reason = rest.partition(" ")
        self.tell(LivenessChanged(Liveness.ALIVE, Liveness(verdict), reason))

    def do_pace(self, rest: str) -> None:
        """`pace crawling 20`"""
        name, ratio = rest.rsplit(" ", 1)
        self.tell(Paced("worker-1", PaceClass(name), float(ratio)))

    def do_kernel(self, rest: str) -> None:
        """A line of the kernel's log."""
        fault = parse_line(rest)
        assert fault is not None
        self.tell(s.DeviceReport(fault, self.now))

    def do_device(self, rest: str) -> None:
        self.tell(s.DeviceReport(None, self.now))

    def do_reported(self, rest: str) -> None:
        self.tell(s.ReportedFatal(self.standing.load, rest))

    def do_gone(self, rest: str) -> None:
        self.tell(s.WorkerGone(self.standing.load, rest))

    def do_restart(self, rest: str) -> None:
        """Whoever keeps them dies, and another goes on from what was written down, in its own time."""
        written = msgspec.json.encode((self.breaker.record(), self.standing))
        record, standing = msgspec.json.decode(written, type=tuple[b.BreakerRecord, WorkerStanding])
        self.breaker = Breaker("worker-1", jitter=lambda: 0.5)
        self.breaker.restore(record, self.now)
        self.standing = s.restore(standing, self.now)
        self.out.clear()

    def do_status(self, rest: str) -> None:
        quarantined = ", quarantined" if self.standing.quarantined else ""
        self.say(f"{self.standing}, weight {self.standing.weight:g}{quarantined}; breaker {self.breaker.state.name}")


class SetStory:
    """A set of workers, measured once a second."""

    def __init__(self) -> None:
        self.outliers = Outliers()
        self.now = 0.0

    def play(self, command: str) -> list[str]:
        """`measure 10 a=1 b=1 c=20`: for ten seconds; `rest 10`: nobody is measured."""
        word, seconds, *words = command.split()
        paces = {name: float(pace) for name, _, pace in (w.partition("=") for w in words)}
        lines = []
        for _ in range(int(seconds)):
            self.now += 1.0
            if word == "measure":
                found = self.outliers.measure(paces, self.now)
                lines += [f"  {self.now:5.1f}  {paced.name} is {paced.reason}" for paced in found]
        return lines


@stories("breaker", "standing", least=12)
def test_the_story_of_a_worker_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those the two machines give."""
    must_go_as_written(path, WorkerStory)


@stories("outliers", least=2)
def test_the_story_of_a_set_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those that comparing the set gives."""
    must_go_as_written(path, SetStory)


def test_what_is_written_down_is_plain_data() -> None:
    """A standing goes through JSON and back unchanged, so that any process can read it."""
    standing = replace(WorkerStanding(), load=3, causes={s.HealthCause.WRONG: "why"})
    assert msgspec.json.decode(msgspec.json.encode(standing), type=WorkerStanding) == standing
