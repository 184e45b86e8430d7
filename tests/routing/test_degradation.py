"""Levels follow what lasts, and nothing else; what a level does is undone by leaving it. And stories, read as text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.core.tiers import Tier, parse_tier
from holdfast.routing.degradation import (
    BOUNDS,
    LEVEL_MAX,
    PATIENCE_MAX,
    RULES,
    Degradation,
    DegradationError,
    LevelRecord,
    Sampled,
    level_at,
    pushed_out,
    refusal,
)
from holdfast.spec.health import DegradationSettings
from tests.rigs.transcripts import must_go_as_written, stories

SETTINGS = DegradationSettings()


def held(
    machine: Degradation, ratio: float, start_s: float, lasts_s: float, *, carriers: int = 4, every_s: float = 0.5
) -> list[LevelRecord]:
    """What a ratio does that is seen for that long."""
    steps = range(int(lasts_s / every_s) + 1)
    changes = [machine.step(Sampled(ratio, carriers), start_s + step * every_s) for step in steps]
    return [record for record in changes if record is not None]


# -- the table


RATIOS = {0: (110, 100), 1: (99, 90, 75), 2: (74, 70, 50), 3: (49, 45, 25), 4: (24, 20, 0)}


@pytest.mark.parametrize(
    ("percent", "level"), [(percent, level) for level, percents in RATIOS.items() for percent in percents]
)
def test_which_ratio_is_which_level(percent: int, level: int) -> None:
    """Below 1, 0.75, 0.5 and 0.25; and whatever stays so gets there, from wherever it starts."""
    assert level_at(percent / 100) == level
    for start in range(LEVEL_MAX + 1):
        machine = Degradation(SETTINGS, LevelRecord(start, "as written"))
        held(machine, percent / 100, 0.0, 61.0)
        assert machine.level == level


def test_each_level_is_stricter_than_the_one_before() -> None:
    """Nothing is allowed at a level that was not at a better one."""
    for better, worse in itertools.pairwise(RULES):
        assert worse.batch_multiplier <= better.batch_multiplier
        assert worse.shed >= better.shed
        assert worse.latency_factor >= better.latency_factor
        assert worse.accepts_new <= better.accepts_new
        assert worse != better
    assert len(RULES) == LEVEL_MAX + 1 == len(BOUNDS) + 1


def test_the_table_in_the_docs_is_the_one_in_the_code() -> None:
    """docs/degradation.md has the rules of each level, word for word."""
    rows = ["| level | capacity, of the SLO | batch | refused when new | latency targets |", "|---|---|---|---|---|"]
    names = ["at least 100 %", *(f"below {bound:.0%}".replace("%", " %") for bound in BOUNDS)]
    for level, (rules, name) in enumerate(zip(RULES, names, strict=True)):
        shed = [f"`{tier.label}`" for tier in Tier if refusal(level, tier)]
        refused = "all" if len(shed) == len(Tier) else ", ".join(shed) or "none"
        rows.append(f"| {level} | {name} | × {rules.batch_multiplier:g} | {refused} | × {rules.latency_factor:g} |")
    assert "\n".join(rows) in (Path(__file__).parents[2] / "docs" / "degradation.md").read_text()


def test_the_times_in_the_docs_are_those_in_the_code() -> None:
    """Each default of the settings stands in docs/degradation.md beside its name."""
    text = (Path(__file__).parents[2] / "docs" / "degradation.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+)", text, re.MULTILINE))
    assert {name: float(value) for name, value in told.items()} == {
        name: getattr(SETTINGS, name) for name in DegradationSettings.__struct_fields__
    }


@pytest.mark.parametrize("level", range(LEVEL_MAX + 1))
def test_premium_is_refused_at_level_4_only(level: int) -> None:
    """And may have all of a worker's places until then; the others have the multiplier's."""
    assert (refusal(level, Tier.PREMIUM) is None) == (level < LEVEL_MAX)
    for places in (0, 1, 2, 8, 9, 256):
        assert RULES[level].places(places, Tier.PREMIUM) == places
        for tier in (Tier.STANDARD, Tier.BEST_EFFORT):
            allowed = RULES[level].places(places, tier)
            assert allowed == (max(1, int(places * RULES[level].batch_multiplier)) if places else 0)


def test_a_refusal_says_why_and_when_to_come_back() -> None:
    """A word for programs, a sentence for people, and the default of 30 s."""
    shed = refusal(2, Tier.BEST_EFFORT)
    assert shed is not None
    assert (shed.reason, shed.retry_after_s) == ("tier_shed", 30.0)
    assert "best_effort" in shed.message
    closed = refusal(4, Tier.PREMIUM)
    assert closed is not None
    assert closed.reason == "no_capacity"
    assert pushed_out(Tier.STANDARD).reason == "pushed_out"


# -- the sketch's defects


@dataclass
class Router:
    """Whoever applies the rules, as something that could be left in a wrong state."""

    batch: float = 1.0
    sheds: frozenset[Tier] = frozenset()
    latency: float = 1.0
    accepts: bool = True
    history: list[int] = field(default_factory=list)

    def apply(self, record: LevelRecord) -> None:
        rules = RULES[record.level]
        self.batch, self.sheds = rules.batch_multiplier, rules.shed
        self.latency, self.accepts = rules.latency_factor, rules.accepts_new
        self.history.append(record.level)


@settings(deadline=None)
@given(st.lists(st.sampled_from([1.2, 1.0, 0.9, 0.7, 0.45, 0.2, None]), max_size=12))
@example([0.2, 0.45, 0.7, 0.9])
@example([None, 0.7])
def test_every_step_down_undoes_what_the_step_up_did(path: list[float | None]) -> None:
    """By whatever way the level comes back to 0, batch, shedding, latency and acceptance are as they were."""
    machine, router, now_s = Degradation(SETTINGS), Router(), 0.0
    for ratio in [*path, 1.0]:
        sample = Sampled(ratio or 0.0, 0 if ratio is None else 4)
        due_s: float | None = now_s
        while due_s is not None:
            now_s = due_s
            if (record := machine.step(sample, now_s)) is not None:
                router.apply(record)
            due_s = machine.next_deadline_s()
        assert (router.batch, router.sheds) == (RULES[machine.level].batch_multiplier, RULES[machine.level].shed)
        assert (router.latency, router.accepts) == (
            RULES[machine.level].latency_factor,
            RULES[machine.level].accepts_new,
        )
    router.history.clear()
    assert router == Router()


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("swing", [0.01, 0.04, 0.049])
@pytest.mark.parametrize("period_s", [1.0, 7.0, 29.0])
def test_hysteresis_a_ratio_that_swings_around_a_bound_moves_nothing(
    bound: float, swing: float, period_s: float
) -> None:
    """For ten minutes, ten of the longest swings, from either side: the level stays what it was."""
    for start in (level_at(bound), level_at(bound - 0.001)):
        machine = Degradation(SETTINGS, LevelRecord(start, "as written"))
        for half_second in range(1200):
            above = int(half_second / 2 / period_s) % 2
            ratio = bound + (swing if above else -swing)
            assert machine.step(Sampled(ratio, 4), half_second / 2) is None


@pytest.mark.parametrize("half_period_s", [40.0, 100.0, 200.0])
def test_hysteresis_what_falls_again_and_again_returns_later_each_time(half_period_s: float) -> None:
    """Swings that last long enough are followed a few times, and then no longer: less than a dozen changes in a day."""
    machine, now_s, changes = Degradation(SETTINGS), 0.0, []
    while now_s < 86_400.0:
        for ratio in (0.72, 0.78):
            changes += held(machine, ratio, now_s, half_period_s, every_s=10.0)
            now_s += half_period_s
    assert 2 <= len(changes) <= 12
    assert changes[-1].patience > 1
    held(machine, 1.0, now_s, PATIENCE_MAX * 30.0)
    assert machine.level == 0


def test_a_worker_ends_what_only_the_want_of_any_began() -> None:
    """Level 4 for want of any worker ends with the first one, at the level of what it carries."""
    for ratio, level in [(1.0, 0), (0.25, 3), (0.2, 4)]:
        machine = Degradation(SETTINGS)
        held(machine, 0.0, 0.0, 30.0, carriers=0)
        assert machine.record == LevelRecord(4, "no worker yet: the first may be loading", vacant=True)
        record = machine.step(Sampled(ratio, 1), 40.0)
        assert record is not None
        assert (record.level, record.vacant) == (level, False)


def test_a_frontend_that_has_a_worker_does_not_believe_that_there_is_none() -> None:
    """Whoever wrote it may be away when a worker comes back; serving must not wait for it."""
    vacant = LevelRecord(4, "no worker for 30 s", vacant=True)
    assert vacant.level_for(has_worker=False) == 4
    assert vacant.level_for(has_worker=True) == 3
    assert LevelRecord(4, "20 % of the SLO").level_for(has_worker=True) == 4


# -- its record


def test_a_record_is_read_as_it_was_written() -> None:
    """Through JSON; a field that an older one does not have is the default."""
    record = LevelRecord(3, "45% of the SLO", patience=4, vacant=False)
    assert msgspec.json.decode(msgspec.json.encode(record), type=LevelRecord) == record
    assert msgspec.json.decode(b'{"level": 2, "reason": "x"}', type=LevelRecord) == LevelRecord(2, "x")


@pytest.mark.parametrize(
    "wrong",
    [
        LevelRecord(5, ""),
        LevelRecord(-1, ""),
        LevelRecord(1, "", patience=0),
        LevelRecord(1, "", patience=99),
        LevelRecord(1, "", planned=-1),
        LevelRecord(1, "", planned=10**9),
    ],
)
def test_a_record_that_cannot_be_is_refused(wrong: LevelRecord) -> None:
    """Whoever restores from it decides what to do."""
    with pytest.raises(DegradationError):
        Degradation(SETTINGS, wrong)


@pytest.mark.parametrize("wrong", [Sampled(float("nan"), 1), Sampled(-0.1, 1), Sampled(1.0, -1)])
def test_a_sample_that_cannot_be_is_refused_and_changes_nothing(wrong: Sampled) -> None:
    """Neither the level nor what was seen so far."""
    machine = Degradation(SETTINGS)
    machine.step(Sampled(0.4, 4), 0.0)
    with pytest.raises(DegradationError):
        machine.step(wrong, 1.0)
    assert machine.step(Sampled(0.4, 4), 2.0) is not None


def test_a_level_outlives_whoever_decided_it() -> None:
    """Restored, it neither forgets a fall nor believes in a return before it has seen it last, patience included."""
    machine = Degradation(SETTINGS, LevelRecord(2, "70% of the SLO", patience=4))
    assert machine.level == 2
    assert machine.next_deadline_s() is None
    assert held(machine, 1.2, 0.0, 39.5) == []
    record = machine.step(Sampled(1.2, 4), 40.0)
    assert record is not None
    assert record.level == 0


# -- the machine against a plain reading of its whole history

moments = st.tuples(
    st.sampled_from([0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0]),
    st.one_of(
        st.none(), st.sampled_from([0.1, 0.2, 0.22, 0.25, 0.3, 0.45, 0.48, 0.5, 0.7, 0.75, 0.8, 0.97, 1.0, 1.05])
    ),
    st.integers(1, 12),  # samples of this kind in a row
)


class Plain:
    """Reads all samples anew each time. Keeps the level and how often it fell back, which no ratio tells."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float | None]] = []
        self.level, self.vacant, self.patience = 0, False, 1
        self.returned_s: float | None = None

    def lasted_s(self, true: Callable[[float | None], bool]) -> float:
        """How long it has been true without a break; -1: it is not."""
        since = [at_s for at_s, _ in itertools.takewhile(lambda seen: true(seen[1]), reversed(self.seen))]
        return self.seen[-1][0] - since[-1] if since else -1.0

    def sample(self, now_s: float, ratio: float | None) -> None:
        self.seen.append((now_s, ratio))
        before = self.level
        if ratio is None:
            if self.lasted_s(lambda one: one is None) >= 30.0:
                self.level, self.vacant = 4, True
        elif self.vacant:
            self.level, self.vacant = level_at(ratio), False
        else:
            self.level = self.weighed()
        if self.level < before:
            self.returned_s = now_s
        if self.level > before and self.returned_s is not None:
            self.patience = min(16, self.patience * 2) if now_s - self.returned_s <= 300.0 else 1
            self.returned_s = None

    def weighed(self) -> int:
        for level in range(4, self.level, -1):
            bound = BOUNDS[level - 1]
            far = self.lasted_s(lambda one, b=bound: one is not None and one < b - 0.049)
            near = self.lasted_s(lambda one, b=bound: one is not None and one < b)
            if far >= 2.0 or near >= 30.0:
                return level
        for level in range(self.level, 0, -1):
            bound = BOUNDS[level - 1]
            far = self.lasted_s(lambda one, b=bound: one is not None and one > b + 0.049)
            near = self.lasted_s(lambda one, b=bound: one is not None and one >= b)
            if far < 10.0 * self.patience and near < 30.0 * self.patience:
                return level
        return 0


@settings(max_examples=300, deadline=None)
@given(st.lists(moments, max_size=25))
def test_the_level_is_what_a_plain_reading_of_the_history_says(story: list[tuple[float, float | None, int]]) -> None:
    """In any order; each change is told once, with the record; the deadline is kept and never in the past."""
    machine, plain, now_s = Degradation(SETTINGS), Plain(), 0.0
    for gap_s, ratio, times in story:
        for _ in range(times):
            now_s += gap_s
            before = machine.record
            changed = machine.step(Sampled(ratio or 0.0, 0 if ratio is None else 3), now_s)
            plain.sample(now_s, ratio)
            record = machine.record
            assert (record.level, record.vacant, record.patience) == (plain.level, plain.vacant, plain.patience)
            assert changed is (record if record is not before else None)
            due_s = machine.next_deadline_s()
            assert due_s is None or due_s > now_s


@settings(max_examples=100, deadline=None)
@given(st.lists(moments, max_size=10))
def test_the_deadline_is_when_the_level_changes(story: list[tuple[float, float | None, int]]) -> None:
    """If nothing else is seen: not before it, and at it; without one, never."""
    machine, now_s, sample = Degradation(SETTINGS), 0.0, Sampled(1.0, 3)
    for gap_s, ratio, times in story:
        for _ in range(times):
            now_s += gap_s
            sample = Sampled(ratio or 0.0, 0 if ratio is None else 3)
            machine.step(sample, now_s)
    due_s = machine.next_deadline_s()
    if due_s is None:
        assert machine.step(sample, now_s + 1e6) is None
    else:
        assert machine.step(sample, (now_s + due_s) / 2) is None
        assert machine.step(sample, due_s) is not None


# -- stories, read as text


class Story:
    """Plays commands against a machine, on time it makes up itself; it samples twice a second."""

    def __init__(self) -> None:
        self.machine = Degradation(SETTINGS)
        self.now_s = 0.0
        self.lines: list[str] = []

    def play(self, command: str) -> list[str]:
        self.lines = []
        word, *words = command.split()
        getattr(self, f"do_{word}")(words)
        return self.lines

    def tell(self, text: str) -> None:
        self.lines.append(f"  {self.now_s:6.1f}  {text}")

    def sample(self, ratio: float, carriers: int) -> None:
        self.now_s += 0.5
        before = self.machine.level
        if (record := self.machine.step(Sampled(ratio, carriers), self.now_s)) is not None:
            patience = f" (patience {record.patience})" if record.patience > 1 else ""
            self.tell(f"{before} -> {record.level}: {record.reason}{patience}")

    def do_capacity(self, words: list[str]) -> None:
        """`capacity 90% 20` for so many seconds; several percentages take turns, one each half second."""
        ratios = [float(word[:-1]) / 100 for word in words[:-1]]
        for step in range(round(float(words[-1]) * 2)):
            self.sample(ratios[step % len(ratios)], 4)

    def do_none(self, words: list[str]) -> None:
        for _ in range(round(float(words[0]) * 2)):
            self.sample(0.0, 0)

    def do_ask(self, words: list[str]) -> None:
        for word in words:
            shed = refusal(self.machine.level, parse_tier(word))
            self.tell(f"{word}: {f'{shed.reason}, again in {shed.retry_after_s:g} s' if shed else 'taken'}")

    def do_status(self, words: list[str]) -> None:
        rules = RULES[self.machine.level]
        shed = ", ".join(tier.label for tier in sorted(rules.shed)) or "nobody"
        accepts = "accepts" if rules.accepts_new else "accepts nothing new"
        targets = f"targets x{rules.latency_factor:g}"
        self.tell(f"level {self.machine.level}: batch x{rules.batch_multiplier:g}, sheds {shed}, {targets}, {accepts}")

    def do_restart(self, words: list[str]) -> None:
        """Whoever decides dies, and so many seconds later another goes on from what was written."""
        written = msgspec.json.encode(self.machine.record)
        self.now_s += float(words[0])
        self.machine = Degradation(SETTINGS, msgspec.json.decode(written, type=LevelRecord), self.now_s)
        self.tell(f"goes on: level {self.machine.level} ({self.machine.record.reason})")


@stories("degradation", least=4)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every transcript's answers are exactly those the machine gives."""
    must_go_as_written(path, Story)
