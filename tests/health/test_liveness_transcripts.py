"""Stories of the liveness judge, read as text: `> command` lines are what happens, the rest is what it answered.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the answers anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.health.liveness import (
    TICK_S,
    Connected,
    Disconnected,
    Effect,
    Judge,
    Judged,
    LivenessError,
    MoveStreams,
    ProbeResult,
    StartProbe,
    Tick,
    Traffic,
)
from holdfast.wire.messages import Beat
from transcript_book import must_go_as_written, transcripts

TRANSCRIPTS = transcripts("liveness")


class Story:
    """Plays commands against a judge, on time it makes up itself."""

    def __init__(self) -> None:
        self.judge = Judge("worker-1")
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

    def take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Judged):
                text = f"{effect.before} -> {effect.after}: {effect.reason}"
            elif isinstance(effect, MoveStreams):
                text = "move streams"
            else:
                self.probing = isinstance(effect, StartProbe)
                text = "start probe" if self.probing else "stop probe"
            self.lines.append(f"  {self.now:5.1f}  {text}")
            if isinstance(effect, StartProbe):
                self.probe()

    def probe(self) -> None:
        self.take(self.judge.step(self.process, self.now))

    def do_connect(self, flags: list[str], values: dict[str, str]) -> None:
        self.take(self.judge.step(Connected("local" in flags), self.now))

    def do_disconnect(self, flags: list[str], values: dict[str, str]) -> None:
        self.take(self.judge.step(Disconnected(), self.now))

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
            self.take(self.judge.step(Tick("open" in flags), self.now))
            if self.probing:
                self.probe()

    def do_late(self, flags: list[str], values: dict[str, str]) -> None:
        """One tick that comes after so many seconds."""
        self.now = round(self.now + float(flags[0]), 3)
        self.take(self.judge.step(Tick("open" in flags), self.now))
        if self.probing:
            self.probe()

    def do_beat(self, flags: list[str], values: dict[str, str]) -> None:
        self.send_beat(values)

    def send_beat(self, values: dict[str, str]) -> None:
        """`steps=+2` moves the count by two with every beat; other numbers stay as last given."""
        steps = self.beat["steps"] + int(values.get("steps", "0"))
        self.beat |= {k: int(v) for k, v in values.items() if k in self.beat}
        self.beat |= {"steps": steps, "count": self.beat["count"] + 1}
        self.take(self.judge.step(Beat(**self.beat), self.now))

    def do_traffic(self, flags: list[str], values: dict[str, str]) -> None:
        self.take(self.judge.step(Traffic(), self.now))

    def do_status(self, flags: list[str], values: dict[str, str]) -> None:
        routable = "routable" if self.judge.routable else "not routable"
        self.lines.append(f"  {self.now:5.1f}  {self.judge.verdict}, {routable}, admit {self.judge.admit_max}")


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every transcript's answers are exactly those the judge gives."""
    must_go_as_written(path, Story)


def test_there_are_stories() -> None:
    """The transcripts are found where they are kept."""
    assert len(TRANSCRIPTS) >= 7
