"""The lifecycle machine: its tables against tables written here, laws over any history, and stories read as text.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the stories' outcomes anew, then read the diff.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.failover.lifecycle import (
    Announced,
    Drained,
    Ended,
    EndpointProblem,
    Entered,
    Event,
    Lifecycle,
    Loaded,
    LockWon,
    MemoryProblem,
    Misstep,
    MustLoad,
    StandDown,
    State,
    WakeFailed,
    live,
    next_deadline_s,
    ready,
    step,
)
from tests.rigs.failover.lifecycle_pages import diagram, moves, probe_table, state_table
from tests.rigs.transcripts import must_go_as_written, stories

DOCS = Path(__file__).parents[2] / "docs" / "failover.md"
WAKE_S = 30.0

EVENTS: dict[str, Event] = {
    "loaded": Loaded(),
    "lock": LockWon(7),
    "announced": Announced(7),
    "failed": WakeFailed("x"),
    "loads": MustLoad("x", 600.0),
    "down": StandDown("x"),
    "drained": Drained(),
    "memory": MemoryProblem("x"),
    "endpoint": EndpointProblem("x"),
    "ended": Ended("x"),
}
# Rows: the state before; columns in the order of EVENTS; "": refused.
EXPECTED = {
    "init": ["standby", "", "", "", "", "", "", "init", "init", "dead"],
    "standby": ["", "waking", "", "", "", "draining", "", "standby", "standby", "dead"],
    "waking": ["", "", "active", "dead", "waking", "draining", "", "waking", "waking", "dead"],
    "active": ["", "", "", "", "", "draining", "", "active", "active", "dead"],
    "draining": ["", "", "", "", "", "draining", "standby", "draining", "draining", "dead"],
    "dead": ["", "", "", "", "", "", "", "", "", "dead"],
}


def failover(state: str = "init", **given: object) -> Lifecycle:
    return Lifecycle(failover=True, wake_s=WAKE_S, state=State(state), **given)  # type: ignore[arg-type]


# -- the tables


@pytest.mark.parametrize("before", EXPECTED)
@pytest.mark.parametrize("word", EVENTS)
def test_every_event_in_every_state(before: str, word: str) -> None:
    """Each leads exactly where the table here says, or is refused and changes nothing."""
    life = failover(before, entered_s=1.0)
    kept = copy.deepcopy(life)
    after = EXPECTED[before][list(EVENTS).index(word)]
    if after:
        result, effects = step(life, EVENTS[word], 3.0)
        assert result.state == after
        moved = [Entered(State(before), State(after), 2.0, result.reason, result.epoch)]
        assert list(effects) == (moved if before != after else [])
    else:
        with pytest.raises(Misstep, match=before):
            step(life, EVENTS[word], 3.0)
    assert life == kept


@pytest.mark.parametrize(
    ("state", "given", "asked", "answers"),
    [
        ("init", {}, {}, (False, False)),
        ("init", {}, {"starting_ready": True}, (True, True)),
        ("init", {"memory_problem": "m", "endpoint_problem": "e"}, {"starting_ready": True}, (True, True)),
        ("standby", {}, {}, (True, True)),
        ("standby", {}, {"endpoints": ("generate",)}, (True, True)),
        ("standby", {"memory_problem": "m"}, {}, (True, False)),
        ("standby", {"endpoint_problem": "e", "endpoint_fatal": True}, {}, (True, True)),
        ("waking", {}, {}, (True, True)),
        ("waking", {"memory_problem": "m"}, {}, (True, True)),
        ("waking", {"entered_s": 100.0 - WAKE_S}, {}, (True, True)),
        ("waking", {"entered_s": 99.9 - WAKE_S}, {}, (False, True)),
        ("active", {}, {}, (True, True)),
        ("active", {"memory_problem": "m"}, {}, (True, True)),
        ("active", {"endpoint_problem": "e"}, {}, (True, False)),
        ("active", {"endpoint_problem": "e", "endpoint_fatal": True}, {}, (False, False)),
        ("active", {}, {"endpoints": ("generate",)}, (True, True)),
        ("active", {"endpoint_problem": "e"}, {"endpoints": ("generate",)}, (True, False)),
        ("active", {}, {"endpoints": ("generate", "embed")}, (True, False)),
        ("draining", {}, {}, (True, False)),
        ("draining", {}, {"starting_ready": True}, (True, False)),
        ("dead", {}, {}, (False, False)),
        ("dead", {}, {"starting_ready": True}, (False, False)),
    ],
)
def test_probes_by_state(
    state: str, given: dict[str, object], asked: dict[str, object], answers: tuple[bool, bool]
) -> None:
    """`/live` and `/health` answer as docs/failover.md's table says, each with a reason."""
    life = failover(state, **{"entered_s": 90.0, **given})
    starting_ready = bool(asked.get("starting_ready"))
    endpoints = tuple(asked.get("endpoints", ()))  # type: ignore[call-overload]
    alive, fit = live(life, 100.0, starting_ready), ready(life, 100.0, starting_ready, endpoints)
    assert (alive[0], fit[0]) == answers
    assert alive[1]
    assert fit[1]


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (failover("standby", epoch=7), LockWon(7)),
        (failover("standby", epoch=7), LockWon(6)),
        (failover("waking", epoch=7), Announced(6)),
    ],
)
def test_an_epoch_never_goes_back(life: Lifecycle, event: Event) -> None:
    """A lock won under an old epoch, or an older one announced, is refused."""
    with pytest.raises(Misstep, match="epoch"):
        step(life, event, 1.0)


# -- laws

reasons = st.sampled_from(["", "a", "b"])
lively: list[st.SearchStrategy[Event]] = [
    st.just(Loaded()),
    st.builds(LockWon, st.integers(1, 50), st.booleans()),
    st.builds(Announced, st.integers(1, 50)),
    st.builds(StandDown, reasons),
    st.just(Drained()),
    st.builds(MustLoad, reasons, st.floats(0, 600)),
    st.builds(MemoryProblem, reasons),
    st.builds(EndpointProblem, reasons, st.booleans()),
]
# What ends it comes seldom, or every history would be short.
events = st.one_of(*lively * 5, st.builds(WakeFailed, reasons), st.builds(Ended, reasons))


@given(st.booleans(), st.lists(st.tuples(events, st.floats(0, 40)), max_size=60))
def test_laws_of_any_history(is_failover: bool, history: list[tuple[Event, float]]) -> None:
    """Whatever happens: a failover worker is Active only after a lock won and then announced, and the counts add up."""
    life, now_s = Lifecycle(is_failover, WAKE_S), 0.0
    told: list[Entered] = []
    elected = announced = False
    for event, passed_s in history:
        now_s += passed_s
        before = life
        try:
            life, effects = step(life, event, now_s)
        except Misstep:
            continue
        told += effects
        elected = isinstance(event, LockWon) or (elected and not isinstance(event, StandDown))
        announced = isinstance(event, Announced) or (announced and life.state is State.ACTIVE)
        assert life.epoch >= before.epoch
        assert bool(effects) == (life.state is not before.state)
        assert before.state is not State.DEAD or life == before
        if life.state is State.ACTIVE and life.failover:
            assert elected
            assert announced
        assert life.endpoint_problem or not life.endpoint_fatal
        assert live(life, now_s)[0] or not ready(life, now_s)[0] or life.state is State.WAKING
    assert sum(life.transitions.values()) == len(told)
    assert sum(effect.duration_s for effect in told) == pytest.approx(life.entered_s)
    assert life.switch_successes <= life.switch_attempts <= life.transitions.get((State.STANDBY, State.WAKING), 0)
    if told:
        assert told[-1].after is life.state
        assert life.durations_s[told[-1].before] == told[-1].duration_s


# -- what people read


def test_pages_show_every_move() -> None:
    """The generated diagram and tables leave out no state and no move but those to Dead that all have."""
    assert len(moves()) == 14
    for before, cause, after in moves():
        assert cause == "ended" or f"{before} --> {after}: {cause}" in diagram()
    for state in State:
        assert f"| {state.capitalize()} |" in state_table()
        assert f"| {state.capitalize()} |" in probe_table()


@pytest.mark.skipif(not DOCS.exists(), reason="docs/failover.md is not written yet")
@pytest.mark.parametrize("part", [diagram, state_table, probe_table])
def test_docs_show_the_tables_of_the_code(part: object) -> None:
    """docs/failover.md has them word for word: `python tests/rigs/failover/lifecycle_pages.py` writes them."""
    assert part() in DOCS.read_text()  # type: ignore[operator]


# -- stories


class Story:
    """Plays commands against one lifecycle, on time it makes up itself."""

    def __init__(self) -> None:
        self.life = Lifecycle(failover=True, wake_s=WAKE_S)
        self.now_s = 0.0

    def play(self, command: str) -> list[str]:
        word, _, rest = command.partition(" ")
        if word == "worker":
            self.life = Lifecycle(failover=False, wake_s=WAKE_S)
            return []
        if word == "wait":
            self.now_s += float(rest)
            return []
        if word == "status":
            return self.status()
        try:
            self.life, effects = step(self.life, self.event(word, rest), self.now_s)
        except Misstep as misstep:
            return [f"    refused: {misstep}"]
        return [f"    {effect}" for effect in effects]

    def event(self, word: str, rest: str) -> Event:
        if word == "lock":
            epoch, _, how = rest.partition(" ")
            return LockWon(int(epoch), contended=how != "first")
        if word == "announced":
            return Announced(int(rest))
        if word == "fatal":
            return EndpointProblem(rest, fatal=True)
        if word == "loads":
            bound_s, _, why = rest.partition(" ")
            return MustLoad(why, float(bound_s))
        kind = {"failed": WakeFailed, "down": StandDown, "memory": MemoryProblem, "endpoint": EndpointProblem}
        return kind[word](rest) if word in kind else Ended(rest) if word == "ended" else EVENTS[word]

    def status(self) -> list[str]:
        life = self.life
        probes = [("live", live(life, self.now_s)), ("health", ready(life, self.now_s))]
        told = [f"    /{name} {200 if good else 503}: {why}" for name, (good, why) in probes]
        deadline_s = next_deadline_s(life)
        deadline = "" if deadline_s is None else f", deadline at {deadline_s:.1f} s"
        switches = f"{life.switch_successes} of {life.switch_attempts} switches"
        return [f"    {self.now_s:.1f} s {life!r}, {switches}{deadline}", *told]


@stories("lifecycle", least=1)
def test_the_lifecycle_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those of today's machine."""
    must_go_as_written(path, Story)
