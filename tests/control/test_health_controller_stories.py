"""Transcripts of the health controller: `> command` lines are what happens, the rest is what it decides. `canary_…`
are about asking and judging one worker, `health_…` about its effect on other workers.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.control import health_controller as hc
from holdfast.health import breaker as b
from holdfast.health import standing as s
from holdfast.health.breaker import FailureKind
from holdfast.health.device_faults import parse_line
from holdfast.health.liveness import Liveness, LivenessChanged
from tests.rigs.transcripts import must_go_as_written, stories
from tests.rigs.worlds.health import QUESTIONS, HealthRig, Worker, answer


class WardStory:
    """A set of workers, as the story wants them."""

    def __init__(self) -> None:
        self.set = HealthRig({})
        self.lines: list[str] = []

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, *words = command.split()
        if word in self.set.workers:
            self.change(word, *words)
        else:
            getattr(self, f"do_{word}")(*words)
        return self.lines

    def say(self, name: str, text: str) -> None:
        self.lines.append(f"  {self.set.now:6.1f}  {name}: {text}")

    def do_workers(self, *words: str) -> None:
        """`workers a=w1 b=w2 verified`: those, with these weights; `given 7`: the card expects other answers."""
        pairs = dict(word.split("=") for word in words if "=" in word)
        shift = int(words[-1]) if "given" in words else None
        given = {} if shift is None else {place: answer(place, shift=shift) for place in range(len(QUESTIONS))}
        self.set = HealthRig(pairs, verified="verified" in words, given=given, say=self.say)

    def do_begin(self, *names: str) -> None:
        """They are there with streams, as when the first that asks comes; with names: those, fresh from their load."""
        self.set.begin(*names, serving=not names)

    def do_new(self, name: str, weights: str, *more: str) -> None:
        """`new d w1 load=2 device=d1`: another process, with these weights."""
        said = dict(word.split("=") for word in more)
        self.set.workers[name] = Worker(weights, int(said.get("load", "1")), device=said.get("device", ""))
        self.set.begin(name)

    def do_wait(self, seconds: str, quietly: str = "") -> None:
        """`wait 40`; `wait 4000 quietly`: canaries that pass are not told."""
        self.set.wait(float(seconds))
        self.lines = [line for line in self.lines if not (quietly and line.endswith(": passed"))]

    def do_reload(self, name: str) -> None:
        self.set.reload(name)

    def do_restart(self) -> None:
        self.set.restart()

    def do_asked(self) -> None:
        """Who was asked, and when, since this was last said."""
        asks, self.set.asks = self.set.asks, []
        self.lines += [f"  {now:6.1f}  {name} is asked question {question}" for now, name, question in asks]

    def do_status(self) -> None:
        for name, standing in self.set.standings.items():
            self.say(name, f"{standing}, weight {standing.weight:g}")

    def do_paces(self, seconds: str, *words: str) -> None:
        """`paces 10 a=1 b=20`: the times per token of those with traffic, for so many seconds."""
        paces = {name: float(pace) for name, _, pace in (word.partition("=") for word in words)}
        for _ in range(int(seconds)):
            self.set.wait(1.0)
            self.set.tell(hc.PacesMeasured(paces))

    def do_fault(self, device: str, number: str) -> None:
        fault = parse_line(f"NVRM: Xid (PCI:0000:3b:00): {number}, GPU trouble")
        assert fault
        self.set.tell(hc.DeviceRead(device, s.DeviceReport(fault, self.set.now)))

    def do_cleared(self, device: str) -> None:
        self.set.tell(hc.DeviceRead(device, s.DeviceReport(None, self.set.now)))

    def change(self, name: str, word: str, *rest: str) -> None:
        """`a right`, `a wrong 7`, `a drifts 0.3`, `a slow 4`, `a busy 0.9`, `a silent`, `a lost`, `a refuses`, …"""
        worker = self.set.workers[name]
        match word:
            case "right":
                worker.how, worker.shift, worker.drift, worker.factor = "answers", 0, 0.0, 1.0
            case "wrong":
                worker.shift = int(rest[0])
            case "drifts":
                worker.drift = float(rest[0])
            case "slow":
                worker.factor = float(rest[0])
            case "busy":
                worker.occupancy = float(rest[0])
            case "unsure":
                worker.margin = 0.3
            case "device":
                worker.device = rest[0]
            case "stalls":
                self.set.tell(hc.AttemptsReported(name, b.Attempts(failed={FailureKind.STALLED: 3})))
            case "serves":
                self.set.tell(hc.AttemptsReported(name, b.Attempts(succeeded=5), tokens=100))
            case "stands" | "wakes":
                worker.group, worker.active = f"group of {worker.weights}", word == "wakes"
                if name in self.set.standings:
                    self.set.begin(name)
            case "verified":
                self.set.tell(hc.WeightsVerified(name, worker.load))
            case "dies":
                del self.set.workers[name]
                self.set.tell(hc.WorkerLost(name, "its process ended"))
            case "gone-unseen":
                del self.set.workers[name]
            case "stopped" | "probation" | "alive":
                judged = LivenessChanged(Liveness.SUSPECT, Liveness(word), "as the story wants")
                self.set.tell(hc.LivenessReported(name, judged))
            case "fails":
                self.set.tell(hc.EngineFailed(name, " ".join(rest)))
            case _:
                worker.how = word
                worker.moving, worker.cut_off = "moving" in rest, "cut-off" in rest


@stories("canary", "health", least=24)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those that asking, judging and comparing give."""
    must_go_as_written(path, WardStory)
