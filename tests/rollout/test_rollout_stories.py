"""Rollouts as stories, read as text: what is asked for, what befalls it, what is done, and what people are told.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from holdfast.rollout import machine as m
from holdfast.rollout.revision import Part, Revision
from holdfast.rollout.status import report
from holdfast.rollout.trial import RequestCounts
from tests.rigs.transcripts import must_go_as_written, stories
from tests.rigs.worlds.rollout import Driver, World, part


def line_of(act: m.RolloutAction) -> str:
    match act:
        case m.LogLine(text):
            return text
        case m.StartReplica(name, _, set_id, beside):
            return f"(start {name} of {set_id}{f' beside {beside}' if beside else ''})"
        case m.ResumeServing(name):
            return f"(call {name} back)"
    return f"({type(act).__name__.removesuffix('Replica').lower()} {act.name})"


class Story:
    """A deployment in a world where a second is a notch."""

    def __init__(self) -> None:
        self.driver = Driver(World())
        self.peers: tuple[str, ...] = ()
        self.lines: list[str] = []

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, _, rest = command.partition(" ")
        getattr(self, f"do_{word}")(rest)
        return self.lines

    def _tell(self, acts: tuple[m.RolloutAction, ...]) -> None:
        self.lines += [f"  {self.driver.now_s:6.0f}  {line_of(act)}" for act in acts]

    def do_apply(self, rest: str) -> None:
        """A number, services as `worker=b*4`, and how all of them are replaced as `surge:2`."""
        number, *words = rest.split()
        how = {key: int(value) for key, _, value in (word.partition(":") for word in words if ":" in word)}
        parts: dict[str, Part] = {}
        for service, _, text in (word.partition("=") for word in words if "=" in word):
            others = tuple(one for one in self.peers if one != service) if service in self.peers else ()
            parts[service] = part(text, peers=others, **how)
        self.driver.desired = Revision(number=int(number), parts=parts, watch_s=5.0)
        self._tell(self.driver.step())

    def do_peers(self, rest: str) -> None:
        self.peers = tuple(rest.split())

    def do_wait(self, rest: str) -> None:
        for acts in self.driver.seconds(int(rest)):
            self._tell(acts)

    def do_fate(self, rest: str) -> None:
        """What becomes of every replica of a set: crashes, refused, canary, early, never, errors, breaker or
        good."""
        set_id, fate = rest.split()
        self.driver.world.fates[set_id] = fate
        if fate == "good":
            self.driver.world.traffic.pop(set_id, None)

    def do_refused(self, rest: str) -> None:
        """Why a set can never be started."""
        set_id, _, why = rest.partition(" ")
        self.driver.world.refused[set_id] = why

    def do_places(self, rest: str) -> None:
        service, _, count = rest.partition("=")
        self.driver.world.places[service] = int(count)

    def do_roomy(self, rest: str) -> None:
        """The devices of a service take a second engine."""
        self.driver.world.roomy.add(rest)

    def do_kill(self, rest: str) -> None:
        for name in rest.split():
            self.driver.world.kill(name)
        self._tell(self.driver.step())

    def do_streams(self, rest: str) -> None:
        """A replica has so many; one ends each second when it drains."""
        name, _, count = rest.partition("=")
        self.driver.world.bodies[name].streams = int(count)

    def do_traffic(self, rest: str) -> None:
        for word in rest.split():
            set_id, _, text = word.partition("=")
            failed, _, attempts = text.partition("/")
            self.driver.world.traffic[set_id] = RequestCounts(int(attempts), int(failed))

    def do_answers(self, rest: str) -> None:
        """Answers of frontends' sets in the last minute, and how many of them were refusals or failures."""
        for word in rest.split():
            set_id, _, text = word.partition("=")
            failed, _, attempts = text.partition("/")
            self.driver.world.answers[set_id] = RequestCounts(int(attempts), int(failed))

    def do_control(self, rest: str) -> None:
        """A control leads (`leads`), or none does that could judge a new set of workers (`away`)."""
        self.driver.world.unchecked = frozenset({"worker"} if rest == "away" else ())
        self._tell(self.driver.step())

    def do_pause(self, _: str) -> None:
        self._pause(True)

    def do_resume(self, _: str) -> None:
        self._pause(False)

    def _pause(self, paused: bool) -> None:
        parts = {key: structs.replace(one, paused=paused) for key, one in self.driver.desired.parts.items()}
        self.driver.desired = structs.replace(self.driver.desired, parts=parts)
        self._tell(self.driver.step())

    def do_restart(self, rest: str) -> None:
        """The process that keeps the rollout going dies; the next goes on from what is written, or from nothing."""
        if rest == "forgetful":
            self.driver.written = b""
        wish = self.driver.desired
        self.driver = self.driver.next_life()
        self.driver.desired = wish
        self._tell(self.driver.step())

    def do_status(self, _: str) -> None:
        told = report(self.driver.state, self.driver.world.observe(self.driver.desired), self.driver.now_s)
        self.lines.append(f"  {self.driver.now_s:6.0f}  {told.state}: {told.headline}")
        self.lines += [f"          {service}" for service in told.services]


@stories("rollout", least=25)
def test_the_story_goes_as_written(path: Path) -> None:
    """Replaying what happens gives the same deeds and the same words, line for line."""
    must_go_as_written(path, Story)
