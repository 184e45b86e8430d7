"""Spares serve as soon as they are needed, and are put by only where nobody misses them. And stories, read as text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.routing.capacity import Capacity, Carrier, Profile, measure_capacity
from holdfast.routing.spares import (
    FLAP_S,
    PATIENCE_MAX,
    SHORT_NEAR_S,
    Reserve,
    SpareCandidate,
    SpareChanged,
    SparesSampled,
)
from holdfast.spec.health import SloSettings, SpareSettings
from tests.rigs.transcripts import must_go_as_written, stories

PROFILE = Profile(100.0, 100.0)
SLO = SloSettings(requests_per_s=10.0)


def capacity_of(members: list[SpareCandidate], planned: int, slo: SloSettings = SLO, factor: float = 1.0) -> Capacity:
    """What those that serve carry, each a share of the promise times `factor`."""
    there = [Carrier(one.name, one.weight, 8) for one in members if not one.spare]
    found = measure_capacity(slo, PROFILE, there, planned, 0.0)
    by_carrier = {name: rates.times(factor) for name, rates in found.by_carrier.items()}
    return replace(found, rates=found.rates.times(factor), by_carrier=by_carrier)


@dataclass
class Set:
    """Workers and their reserve; whoever becomes a spare is one at once."""

    reserve: Reserve
    members: list[SpareCandidate]
    now_s: float = 0.0
    slo: SloSettings = SLO
    factor: float = 1.0  # what a worker carries, of its share
    level: int = 0
    whole: bool = True

    def look(self) -> list[SpareChanged]:
        capacity = capacity_of(self.members, max(1, self.reserve.serving), self.slo, self.factor)
        found = self.reserve.step(SparesSampled(self.members, capacity, self.level, self.whole), self.now_s)
        for one in found:
            self.weigh(one.name, spare=one.spare)
        return list(found)

    def weigh(self, name: str, **changes: object) -> None:
        self.members = [replace(one, **changes) if one.name == name else one for one in self.members]

    def falls(self, name: str, weight: float = 0.0) -> None:
        self.weigh(name, weight=weight, sound=False)

    def returns(self, name: str) -> None:
        self.weigh(name, weight=1.0, sound=True)

    def run(self, seconds: float) -> list[SpareChanged]:
        """Two looks a second."""
        found = []
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            found += self.look()
        return found

    @property
    def spares(self) -> list[str]:
        return [one.name for one in self.members if one.spare]


def a_set(workers: int, spares: str, *, planned: int | None = None) -> Set:
    members = [SpareCandidate(f"w{number:02}", 1.0, True) for number in range(1, workers + 1)]
    return Set(Reserve(SpareSettings(spares), workers if planned is None else planned), members)


# -- how many


@pytest.mark.parametrize(
    ("spares", "workers", "kept"),
    [
        *[("0", 10, 0), ("1", 1, 0), ("1", 2, 1), ("3", 10, 3), ("20", 10, 9)],
        *[("10%", 9, 0), ("10%", 10, 1), ("10%", 29, 2), ("5%", 19, 0), ("5%", 20, 1), ("50%", 1, 0)],
    ],
)
def test_how_many_are_kept(spares: str, workers: int, kept: int) -> None:
    """A number, or a share rounded down, which leaves a small set without; one always serves."""
    them = a_set(workers, spares)
    them.run(5)
    assert len(them.spares) == kept == them.reserve.wanted


@pytest.mark.parametrize("wrong", ["", "-1", "51%", "some", "1.5", "5 %"])
def test_what_is_no_number_of_spares_is_refused(wrong: str) -> None:
    """By the setting's name."""
    with pytest.raises(ValueError, match="spares"):
        SpareSettings(wrong)


# -- serving


def test_a_spare_serves_at_the_first_look_after_a_fall() -> None:
    """Whatever is promised, and without any wait: as many as fell, and no more."""
    for slo in (SLO, SloSettings()):
        them = a_set(10, "2")
        them.slo = slo
        them.run(5)
        assert them.spares == ["w09", "w10"]
        them.falls("w03")
        assert them.look() == [SpareChanged("w09", False, "7 of 8 workers serve")]
        them.falls("w04")
        assert them.look() == [SpareChanged("w10", False, "7 of 8 workers serve")]
        them.falls("w05")
        assert them.look() == []


def test_a_doubted_worker_is_made_up_for() -> None:
    """At half its traffic half a worker is missing, which only a whole one can make up for."""
    them = a_set(10, "1")
    them.run(5)
    them.falls("w01", weight=0.5)
    assert [one.name for one in them.look()] == ["w10"]


def test_a_waking_standby_is_waited_for() -> None:
    """It counts as the worker that it will be, so that a takeover brings no spare."""
    them = a_set(10, "1")
    them.run(5)
    them.falls("w01")
    them.members.append(SpareCandidate("group of w01", 1.0, False))
    assert them.look() == []


def test_slow_workers_bring_spares_too() -> None:
    """Nobody fell, and capacity is short of the promise: at once if clearly, after a while if hardly."""
    them = a_set(10, "2")
    them.run(5)
    them.factor = 0.99
    assert them.run(SHORT_NEAR_S - 0.5) == []
    assert [one.spare for one in them.run(1)] == [False]
    clear = a_set(10, "2")
    clear.run(5)
    clear.factor = 0.9
    assert [one.spare for one in clear.look()] == [False]


def test_a_spare_that_fell_is_a_spare_when_it_returns() -> None:
    """It is of no use meanwhile, and gets no traffic by having fallen; a doubted one is used last."""
    them = a_set(10, "2")
    them.run(5)
    them.falls("w09")
    assert them.run(300) == []
    them.falls("w01")
    assert [one.name for one in them.look()] == ["w10"]
    them.weigh("w09", weight=0.5)
    them.falls("w02")
    assert [one.name for one in them.look()] == ["w09"]


# -- being put by


def test_it_is_put_by_again_when_all_is_back_and_has_been_for_a_while() -> None:
    """Not before; whoever runs the fewest streams, so that the fewest of them share its worker with nobody new."""
    them = a_set(10, "1")
    them.run(5)
    them.falls("w01")
    them.look()
    them.returns("w01")
    for one in them.members:
        them.weigh(one.name, running=0 if one.name == "w04" else 5)
    assert them.run(60) == []
    assert them.run(1) == [SpareChanged("w04", True, "9 of 10 workers serve, which is enough")]


def test_each_time_it_was_needed_soon_after_the_wait_is_twice_as_long() -> None:
    """Up to a bound; a while of peace ends that."""
    them = a_set(10, "1")
    them.run(5)
    waits = []
    for _ in range(7):
        them.falls("w01")
        them.look()
        them.returns("w01")
        began_s = them.now_s
        while not them.look():
            them.now_s += 0.5
        waits.append(round((them.now_s - began_s) / 60))
    assert waits == [1, 2, 4, 8, 16, 16, 16]
    assert PATIENCE_MAX == 16
    them.run(FLAP_S + 1)
    them.falls("w01")
    them.look()
    them.returns("w01")
    assert them.run(60) == []
    assert len(them.run(1)) == 1


@pytest.mark.parametrize("why", ["level", "starting", "one fell", "the promise"])
def test_nobody_is_put_by_where_it_would_be_missed(why: str) -> None:
    """Degraded, still starting, one short, or the others would not keep the promise."""
    them = a_set(10, "1")
    them.level = 1 if why == "level" else 0
    them.whole = why != "starting"
    them.factor = 0.95 if why == "the promise" else 1.0
    if why == "one fell":
        them.falls("w01")
    assert them.run(60 * (PATIENCE_MAX + 1)) == []  # the longest that anybody is waited with


def test_those_that_come_are_put_by_at_once_until_the_reserve_was_full() -> None:
    """At the start nobody's traffic is taken, so nothing is waited for."""
    them = a_set(8, "2", planned=10)
    assert them.run(5) == []
    them.members.append(SpareCandidate("w09", 1.0, True))
    assert [one.spare for one in them.run(1)] == [True]
    them.members.append(SpareCandidate("w10", 1.0, True))
    assert [one.spare for one in them.run(1)] == [True]
    taken_over = Reserve(SpareSettings("2"), 10, begun=True)
    them = Set(taken_over, [replace(one, spare=False) for one in them.members])
    assert them.run(60) == []
    assert len(them.run(62)) == 2


# -- any set

changes = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 5.0, 70.0]),  # time that passes
    st.integers(0, 7),  # whom it is about
    st.sampled_from(["falls", "doubted", "returns", "leaves", "comes", "slow", "fast", "level", "quiet", "nothing"]),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.sampled_from(["0", "1", "3", "25%", "50%"]), st.lists(changes, max_size=40))
@example(2, "1", [(0.0, 0, "slow"), (0.0, 2, "comes")])
@example(1, "1", [(0.0, 4, "comes"), (0.0, 4, "falls"), (0.0, 1, "comes")])
@example(8, "3", [(5.0, 1, "slow"), (5.0, 6, "falls"), (5.0, 7, "leaves"), (1.0, 7, "falls"), (5.0, 4, "leaves")])
def test_what_always_holds(workers: int, spares: str, story: list[tuple[float, int, str]]) -> None:
    """Whatever happens: none is put by who is missed; with a spare that could serve nobody is short for longer than a
    look; the deadline is never in the past; and after peace the reserve is as it should be."""
    them = a_set(workers, spares)
    for gap_s, who, what in story:
        name = f"w{who + 1:02}"
        them.now_s += gap_s
        there = {one.name for one in them.members}
        match what:
            case "falls":
                them.falls(name)
            case "doubted":
                them.falls(name, weight=0.5)
            case "returns":
                them.returns(name)
            case "leaves":
                them.members = [one for one in them.members if one.name != name]
            case "comes" if name not in there:
                them.members.append(SpareCandidate(name, 1.0, True))
            case "slow" | "fast":
                them.factor = 0.8 if what == "slow" else 1.3
            case "level" | "quiet":
                them.level = int(what == "level")
        must_hold(them)
    them.level, them.factor = 0, 1.0
    for who in range(max(8, workers)):
        them.returns(f"w{who + 1:02}")
        if f"w{who + 1:02}" not in {one.name for one in them.members}:
            them.members.append(SpareCandidate(f"w{who + 1:02}", 1.0, True))
    for _ in range(9):
        them.now_s += PATIENCE_MAX * 60.0
        must_hold(them)
    assert len(them.spares) == them.reserve.wanted


def must_hold(them: Set) -> None:
    before = {one.name: one for one in them.members}
    short = sum(one.weight for one in them.members if not one.spare) < them.reserve.serving
    promised = max(1, them.reserve.serving)  # as it is when it is looked at: one more that comes makes the set larger
    usable = [one for one in them.members if one.spare and one.weight > 0.0]
    found = them.look()
    for one in found:
        assert before[one.name].spare != one.spare
        if one.spare:
            assert before[one.name].sound
            assert them.level == 0
            assert sum(m.weight for m in them.members if not m.spare) >= max(1, them.reserve.serving)
            assert capacity_of(them.members, promised, SLO, them.factor).ratio >= 1.0
    if short and usable:
        assert [one.spare for one in found][:1] == [False]
    kept = [one for one in them.members if one.spare and one.weight > 0.0]  # one that fell is none, until it returns
    assert len(kept) <= max(them.reserve.wanted, len(usable))
    due_s = them.reserve.next_deadline_s()
    assert due_s is None or due_s > them.now_s - 0.001


# -- stories, read as text


class Story:
    """Plays commands against a set, on time it makes up itself."""

    def __init__(self) -> None:
        self.them = a_set(0, "0")

    def play(self, command: str) -> list[str]:
        word, *words = command.split()
        return list(getattr(self, f"do_{word}")(*words))

    def told(self, found: list[SpareChanged]) -> list[str]:
        at = f"  {self.them.now_s:6.1f}  "
        return [f"{at}{one.name} {'is put by' if one.spare else 'serves'}: {one.reason}" for one in found]

    def do_set(self, workers: str, spares: str) -> list[str]:
        self.them = a_set(int(workers), spares)
        return []

    def do_wait(self, seconds: str) -> list[str]:
        lines = []
        for _ in range(round(float(seconds) * 2)):
            lines += self.told(self.them.run(0.5))
        return lines

    def do_falls(self, name: str) -> list[str]:
        self.them.falls(name)
        return self.told(self.them.look())

    def do_returns(self, name: str) -> list[str]:
        self.them.returns(name)
        return self.told(self.them.look())

    def do_carry(self, percent: str) -> list[str]:
        self.them.factor = float(percent[:-1]) / 100
        return self.told(self.them.look())

    def do_show(self) -> list[str]:
        spares = ", ".join(self.them.spares) or "none"
        return [f"          {self.them.reserve.serving} of {self.them.reserve.size} should serve; in reserve: {spares}"]


@stories("spares", least=2)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every transcript's answers are exactly those the machine gives."""
    must_go_as_written(path, Story)
