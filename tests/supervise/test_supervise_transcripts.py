"""Stories of supervised processes: `> command` lines are what happens, the rest is what the supervisor does about it.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.supervise import life as m
from holdfast.supervise.life import Life, Phase, Policy
from holdfast.supervise.machine import step
from holdfast.supervise.probes import Answer, Asked, Probes, weigh
from transcript_book import must_go_as_written, transcripts

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
