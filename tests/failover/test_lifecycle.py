"""The lifecycle machine: its tables against tables written here, laws over any history, and stories read as text.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the stories' outcomes anew, then read the diff.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_pages import diagram, moves, probe_table, state_table

from holdfast.failover.lifecycle import (
    Announced,
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
    Rested,
    StandDown,
    State,
    WakeFailed,
    live,
    next_deadline_s,
    ready,
    step,
)
from transcript_book import must_go_as_written, transcripts

TRANSCRIPTS = transcripts("lifecycle")
DOCS = Path(__file__).parents[2] / "docs" / "failover.md"
WAKE_S = 30.0

EVENTS: dict[str, Event] = {
    "loaded": Loaded(),
    "lock": LockWon(7),
    "announced": Announced(7),
    "failed": WakeFailed("x"),
    "loads": MustLoad("x", 600.0),
    "down": StandDown("x"),
    "rested": Rested(),
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


def shadow(state: str = "init", **given: object) -> Lifecycle:
    return Lifecycle(shadow=True, wake_s=WAKE_S, state=State(state), **given)  # type: ignore[arg-type]


# -- the tables


@pytest.mark.parametrize("before", EXPECTED)
@pytest.mark.parametrize("word", EVENTS)
def test_every_event_in_every_state(before: str, word: str) -> None:
    """Each leads exactly where the table here says, or is refused and changes nothing."""
    life = shadow(before, entered_s=1.0)
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


@pytest.mark.parametrize("word", EVENTS)
def test_a_normal_worker_begins_as_active(word: str) -> None:
    """From Init it is loaded straight into Active; in all else its first state is any worker's."""
    life = Lifecycle(shadow=False, wake_s=WAKE_S)
    after = "active" if word == "loaded" else EXPECTED["init"][list(EVENTS).index(word)]
    if after:
        assert step(life, EVENTS[word], 1.0)[0].state == after
    else:
        with pytest.raises(Misstep):
            step(life, EVENTS[word], 1.0)


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
    life = shadow(state, **{"entered_s": 90.0, **given})
    starting_ready = bool(asked.get("starting_ready"))
    endpoints = tuple(asked.get("endpoints", ()))  # type: ignore[call-overload]
    alive, fit = live(life, 100.0, starting_ready), ready(life, 100.0, starting_ready, endpoints)
    assert (alive[0], fit[0]) == answers
    assert alive[1]
    assert fit[1]


def test_a_missing_endpoint_is_named() -> None:
    """Whoever reads the refusal learns which name is wrong."""
    assert "'embed'" in ready(shadow("active"), 1.0, endpoints=("generate", "embed"))[1]


def test_only_waking_has_a_deadline() -> None:
    """It is when the wake began plus what it may take; every other state may last."""
    deadlines = {state: next_deadline_s(shadow(state, entered_s=5.0)) for state in State}
    assert deadlines == dict.fromkeys(State) | {State.WAKING: 5.0 + WAKE_S}


def test_a_wake_that_has_to_load_gets_the_time_of_a_load() -> None:
    """From the moment it says so; it lives until then, says what it loads, and once it has led that is forgotten."""
    life, _ = step(shadow("waking", entered_s=5.0, epoch=7), MustLoad("the weights are lost", 600.0), 20.0)
    assert next_deadline_s(life) == 620.0
    assert live(life, 619.0) == (True, "waking: the weights are lost")
    assert not live(life, 621.0)[0]
    life, _ = step(life, Announced(7), 300.0)
    assert (next_deadline_s(life), live(life, 300.0)) == (None, (True, "serving"))


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (shadow("standby", epoch=7), LockWon(7)),
        (shadow("standby", epoch=7), LockWon(6)),
        (shadow("waking", epoch=7), Announced(6)),
    ],
)
def test_an_epoch_never_goes_back(life: Lifecycle, event: Event) -> None:
    """A lock won under an old epoch, or an older one announced, is refused."""
    with pytest.raises(Misstep, match="epoch"):
        step(life, event, 1.0)


def test_the_first_leader_switches_nothing() -> None:
    """A lock nobody had before is no attempt at a failover, and its wake no success of one."""
    life, _ = step(shadow("standby"), LockWon(1, contended=False), 1.0)
    life, _ = step(life, Announced(1), 2.0)
    assert (life.state, life.switch_attempts, life.switch_successes) == (State.ACTIVE, 0, 0)


def test_a_problem_that_is_over_is_not_fatal() -> None:
    """Clearing it clears all of it, whatever the flag says."""
    life, _ = step(shadow("active"), EndpointProblem("the canary failed", fatal=True), 1.0)
    assert life.endpoint_fatal
    life, _ = step(life, EndpointProblem("", fatal=True), 2.0)
    assert (live(life, 2.0)[0], ready(life, 2.0)[0], life.endpoint_fatal) == (True, True, False)


# -- laws

reasons = st.sampled_from(["", "a", "b"])
lively: list[st.SearchStrategy[Event]] = [
    st.just(Loaded()),
    st.builds(LockWon, st.integers(1, 50), st.booleans()),
    st.builds(Announced, st.integers(1, 50)),
    st.builds(StandDown, reasons),
    st.just(Rested()),
    st.builds(MustLoad, reasons, st.floats(0, 600)),
    st.builds(MemoryProblem, reasons),
    st.builds(EndpointProblem, reasons, st.booleans()),
]
# What ends it comes seldom, or every history would be short.
events = st.one_of(*lively * 5, st.builds(WakeFailed, reasons), st.builds(Ended, reasons))


@given(st.booleans(), st.lists(st.tuples(events, st.floats(0, 40)), max_size=60))
def test_laws_of_any_history(is_shadow: bool, history: list[tuple[Event, float]]) -> None:
    """Whatever happens: a shadow is Active only after a lock won and then announced, and the counts add up."""
    life, now_s = Lifecycle(is_shadow, WAKE_S), 0.0
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
        if life.state is State.ACTIVE and life.shadow:
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


def test_its_repr_is_a_status_line() -> None:
    """State, epoch, why, and what troubles it, in one line."""
    life = shadow("active", epoch=7, reason="announced", memory_problem="the vault is gone")
    assert repr(life) == str(life) == "<shadow active, epoch 7 (announced), memory: the vault is gone>"
    assert repr(Lifecycle(shadow=False, wake_s=1.0)) == "<worker init>"


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
    """docs/failover.md has them word for word: `python tests/failover/lifecycle_pages.py` writes them."""
    assert part() in DOCS.read_text()  # type: ignore[operator]


# -- stories


class Story:
    """Plays commands against one lifecycle, on time it makes up itself."""

    def __init__(self) -> None:
        self.life = Lifecycle(shadow=True, wake_s=WAKE_S)
        self.now_s = 0.0

    def play(self, command: str) -> list[str]:
        word, _, rest = command.partition(" ")
        if word == "worker":
            self.life = Lifecycle(shadow=False, wake_s=WAKE_S)
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


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_lifecycle_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those of today's machine."""
    must_go_as_written(path, Story)
