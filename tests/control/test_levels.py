"""Control's level and spares follow from the workers that are there. And stories, read as text."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control.degradation import (
    PLAN_S,
    WAKE_S,
    BeatReceived,
    LevelController,
    LevelEffect,
    LevelEvent,
    RequestsEnded,
    VerdictWritten,
    WorkerCame,
    WorkerWent,
    WriteLevel,
)
from holdfast.control.worker_health import WorkerFacts
from holdfast.core.ports import DeadlineReached
from holdfast.health.records import HealthRecord
from holdfast.health.standing import HealthStatus, WorkerStanding
from holdfast.routing.degradation import LevelRecord, level_at
from holdfast.routing.spares import SpareChanged
from holdfast.spec.health import LevelSettings, SloSettings, SpareSettings
from tests.rigs.transcripts import must_go_as_written, stories

CAUSES = {
    HealthStatus.UNHEALTHY: {"lost": "stopped"},
    HealthStatus.SUSPICIOUS: {"slow": "slow"},
    HealthStatus.HEALTHY: {},
}
WEIGHTS = {HealthStatus.UNHEALTHY: 0.0, HealthStatus.SUSPICIOUS: 0.5, HealthStatus.HEALTHY: 1.0}


def standing(status: HealthStatus, *, quarantined: bool = False) -> WorkerStanding:
    return WorkerStanding(
        status=status, weight=WEIGHTS[status], reason="", causes=CAUSES[status], quarantined=quarantined, load=1
    )


class Deployment:
    """Workers and their keeper, on time it makes up itself; whatever is to be written stands at once."""

    def __init__(self, *, workers: int = 0, spares: str = "0", rate: float = 10.0) -> None:
        self.settings = LevelSettings(
            slo=SloSettings(requests_per_s=rate, workers=workers), reserve=SpareSettings(spares)
        )
        self.now_s = 1000.0
        self.written: LevelRecord | None = None
        self.records: dict[str, HealthRecord] = {}
        self.facts: dict[str, WorkerFacts] = {}
        self.tokens: dict[str, int] = {}
        self.kept = LevelController(self.settings)
        self.said: list[tuple[float, LevelEffect]] = []

    def tell(self, event: LevelEvent) -> list[LevelEffect]:
        effects = list(self.kept.step(event, self.now_s))
        for effect in effects:
            self.said.append((self.now_s, effect))
            match effect:
                case WriteLevel():
                    self.written = effect.record
                case SpareChanged():
                    self.records[effect.name] = msgspec.structs.replace(self.records[effect.name], spare=effect.spare)
        return effects

    def comes(self, name: str, *, group: str = "", active: bool = True, kind: str = "m") -> None:
        facts = WorkerFacts(name, kind, group=group, active=active)
        self.facts[name] = facts
        self.tell(WorkerCame(name, facts, 8))
        self.weigh(name, HealthStatus.HEALTHY)

    def weigh(self, name: str, status: HealthStatus, *, quarantined: bool = False) -> None:
        spare = name in self.records and self.records[name].spare
        record = HealthRecord(name=name, standing=standing(status, quarantined=quarantined), spare=spare)
        self.records[name] = record
        self.tell(VerdictWritten(name, record))

    def goes(self, name: str) -> None:
        del self.facts[name], self.records[name]
        self.tell(WorkerWent(name))

    def wait(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while (due_s := self.kept.next_deadline_s()) <= end_s:
            self.now_s = max(due_s, self.now_s)
            self.tell(DeadlineReached())
        self.now_s = end_s

    def run(self, names: list[str], streams: int, pace_ms: float, seconds: int) -> None:
        """Traffic on these, ten beats a second."""
        for _ in range(seconds * 10):
            self.now_s += 0.1
            for name in names:
                self.tokens[name] = self.tokens.get(name, 0) + round(streams * 100 / pace_ms)
                self.tell(BeatReceived(name, streams, self.tokens[name]))
            self.tell(DeadlineReached())

    def restart(self, after_s: float) -> None:
        """Control is killed, and another leads after a while: it reads what stands, and finds those that are there."""
        self.now_s += after_s
        level = msgspec.json.decode(msgspec.json.encode(self.written), type=LevelRecord) if self.written else None
        continues = bool(self.facts.keys() & self.records.keys())
        self.kept = LevelController(self.settings, level, continues=continues)
        for name, facts in self.facts.items():
            self.tell(WorkerCame(name, facts, 8))
            self.tell(VerdictWritten(name, self.records[name]))

    @property
    def levels(self) -> list[int]:
        """Each level that was written, once."""
        found: list[int] = []
        for _, effect in self.said:
            if isinstance(effect, WriteLevel) and [effect.record.level] != found[-1:]:
                found.append(effect.record.level)
        return found

    @property
    def spares(self) -> list[str]:
        return sorted(name for name, record in self.records.items() if record.spare)


def whole(workers: int, spares: str = "0") -> Deployment:
    them = Deployment(workers=workers, spares=spares)
    for number in range(1, workers + 1):
        them.comes(f"w{number:02}")
    them.wait(2)
    assert (them.kept.level, them.kept.starting) == (0, False)
    return them


# -- must be true


def test_levels_follow_the_workers_that_fall_and_return() -> None:
    """Ten fall to nine, seven, four and a half (one is doubted), two, none; and all come back: 0 again."""
    them = whole(10)
    for left, doubted, level in [(9, 0, 1), (7, 0, 2), (4, 1, 3), (2, 0, 4), (0, 0, 4)]:
        for number in range(1, 11):
            status = HealthStatus.HEALTHY if number <= left else HealthStatus.UNHEALTHY
            them.weigh(f"w{number:02}", HealthStatus.SUSPICIOUS if left < number <= left + doubted else status)
        them.wait(60)
        assert them.kept.level == level
    for number in range(1, 11):
        them.weigh(f"w{number:02}", HealthStatus.HEALTHY)
    them.wait(60)
    assert them.levels[:5] == [0, 1, 2, 3, 4]
    assert them.levels[-1] == 0
    assert not them.written.vacant


def test_a_worker_that_comes_and_goes_around_a_bound_does_not_make_the_level_flap() -> None:
    """Every few seconds for an hour: two changes at most, and then it stays where it was safe."""
    them = whole(4)
    for number in range(1, 900):
        them.weigh("w01", HealthStatus.UNHEALTHY if number % 2 else HealthStatus.SUSPICIOUS)
        them.wait(4)
    assert len(them.levels) <= 3


def test_models_share_a_promise_and_the_loss_of_one_is_its_share() -> None:
    """Nine workers of one model, one of another which falls: a tenth is missing, and nobody of the others is shed."""
    them = Deployment(workers=10)
    for number in range(9):
        them.comes(f"a{number}", kind="a")
    them.comes("b", kind="b")
    them.wait(2)
    them.weigh("b", HealthStatus.UNHEALTHY)
    them.wait(60)
    assert them.kept.level == 1


# -- starting


def test_a_start_that_does_not_come_to_its_end_is_a_loss() -> None:
    """Two minutes after the first worker one of four is what there is."""
    them = Deployment(workers=4)
    them.wait(20)
    them.comes("w1")
    them.wait(115)
    assert them.levels == [0]
    them.wait(10)
    assert them.levels == [0, 3]


def test_a_start_without_any_worker_is_held_for_and_then_refused() -> None:
    """As at any other time; the first worker ends it, and the others have their time to come."""
    them = Deployment(workers=4)
    them.wait(60)
    assert them.levels == [0, 4]
    them.comes("w1")
    them.wait(60)
    assert them.levels == [0, 4, 0]


def test_the_level_of_a_former_life_is_forgotten() -> None:
    """What was written when the deployment was stopped says nothing of one whose workers are all new."""
    them = Deployment(workers=4)
    them.written = LevelRecord(3, "as it was stopped", patience=8, planned=4)
    them.restart(0.0)
    them.wait(0.5)
    assert them.levels == [0]
    for number in range(4):
        them.comes(f"w{number}")
    them.wait(5)
    assert (them.levels, them.written.patience) == ([0], 1)


@pytest.mark.parametrize("level", range(5))
def test_control_goes_on_from_what_is_written(level: int) -> None:
    """It is killed at a level and another goes on: the level stays, and moves only by what is seen anew."""
    ratio = (1.0, 0.9, 0.7, 0.4, 0.2)[level]
    them = whole(10)
    for number in range(round(ratio * 10) + 1, 11):
        them.weigh(f"w{number:02}", HealthStatus.UNHEALTHY)
    them.wait(60)
    assert them.kept.level == level
    them.said.clear()
    them.restart(5)
    them.wait(300)
    assert them.said == []
    assert them.kept.level == level


def test_without_a_word_of_how_many_there_should_be_it_is_the_most_that_were() -> None:
    """That is written down too: who goes on from there does not take what is left for the whole."""
    them = Deployment()
    for number in range(4):
        them.comes(f"w{number}")
        them.wait(5)
    assert (them.levels, them.written.planned) == ([0], 4)
    them.goes("w0")
    them.goes("w1")
    them.wait(10)
    assert them.kept.level == 2
    them.restart(5)
    them.wait(300)
    assert (them.kept.level, them.written.planned) == (2, 4)


@pytest.mark.parametrize("restarts", [False, True])
def test_fewer_workers_for_good_are_the_plan_after_a_while(restarts: bool) -> None:
    """Ten become two on purpose, and nobody says so: level 4 for ten minutes, not for ever, for nobody who is refused
    could show what two carry. A control that goes on from what is written waits for ten minutes of its own."""
    them = Deployment()
    for number in range(10):
        them.comes(f"w{number}")
    them.wait(5)
    for number in range(2, 10):
        them.goes(f"w{number}")
    them.wait(PLAN_S / 2)
    if restarts:
        them.restart(5)
        them.wait(PLAN_S / 2)
    them.wait(PLAN_S / 2 - 10)
    assert (them.kept.level, them.written.planned) == (4, 10)
    them.wait(60)
    assert (them.kept.level, them.written.planned) == (0, 2)


def test_who_comes_back_within_ten_minutes_is_missed_until_then() -> None:
    """A host that restarts leaves the plan as it was; and so do hours without any worker."""
    them = Deployment()
    for number in range(4):
        them.comes(f"w{number}")
    for _ in range(3):
        them.goes("w0")
        them.wait(PLAN_S - 1)
        assert them.kept.level == 1
        them.comes("w0")
        them.wait(60)
    for number in range(4):
        them.goes(f"w{number}")
    them.wait(10 * PLAN_S)
    them.comes("w1")
    them.wait(PLAN_S - 60)
    assert (them.kept.level, them.written.planned) == (3, 4)


def test_a_told_number_is_missed_for_ever_but_does_not_refuse_everybody_for_ever() -> None:
    """Two of ten that were told: level 4, and after ten minutes 3, where traffic shows what they carry."""
    them = whole(10)
    for number in range(3, 11):
        them.goes(f"w{number:02}")
    them.wait(PLAN_S - 10)
    assert them.kept.level == 4
    them.wait(60)
    assert them.kept.level == 3
    them.wait(10 * PLAN_S)
    assert (them.kept.level, them.written.planned) == (3, 10)
    them.weigh("w01", HealthStatus.SUSPICIOUS)
    them.wait(60)
    assert them.kept.level == 3
    them.weigh("w01", HealthStatus.HEALTHY)
    for number in range(3, 11):
        them.comes(f"w{number:02}")
    them.wait(60)
    assert them.kept.level == 0


def test_what_was_measured_refuses_nobody_while_workers_are_there() -> None:
    """One of four is lost and long answers end: on paper the rest carry next to nothing of the promise, and level 4
    would keep away all that could show otherwise. It is for want of workers."""
    them = whole(4)
    them.goes("w04")
    them.run(["w01", "w02", "w03"], streams=4, pace_ms=50, seconds=20)
    them.tell(RequestsEnded(6, 600, 60_000))
    them.wait(30)
    assert them.kept.capacity is not None
    assert them.kept.capacity.ratio < 0.2
    assert them.kept.level == 3
    them.goes("w02")
    them.goes("w03")
    them.weigh("w01", HealthStatus.SUSPICIOUS)
    them.wait(60)
    assert them.kept.level == 4, "an eighth of them is there"


def test_who_fell_and_returns_is_measured_anew() -> None:
    """On their way down they looked slow with full batches, which a level does not let them have again: what they
    showed then is no reason for it to stay."""
    them = whole(4)
    names = ["w01", "w02", "w03", "w04"]
    them.run(names, streams=8, pace_ms=200, seconds=20)
    assert them.kept.level > 0
    for name in names:
        them.weigh(name, HealthStatus.UNHEALTHY)
    them.wait(60)
    for name in names:
        them.weigh(name, HealthStatus.HEALTHY)
    them.run(names, streams=6, pace_ms=10, seconds=60)
    assert them.kept.level == 0


def test_a_set_that_was_made_smaller_keeps_its_spares_again() -> None:
    """Ten with one spare become four for good: after a while three serve, and one is kept."""
    them = Deployment(spares="1")
    for number in range(10):
        them.comes(f"w{number}")
    them.wait(5)
    assert len(them.spares) == 1
    for number in range(4, 10):
        them.goes(f"w{number}")
    them.wait(PLAN_S - 10)
    assert them.spares == []
    them.wait(200)
    assert (len(them.spares), them.kept.level) == (1, 0)


# -- standbys


def pairs(count: int, spares: str = "0") -> Deployment:
    them = Deployment(workers=count, spares=spares)
    for number in range(1, count + 1):
        them.comes(f"w{number}a", group=f"w{number}")
        them.comes(f"w{number}b", group=f"w{number}", active=False)
    them.wait(2)
    return them


@pytest.mark.parametrize("goes_first", [True, False])
def test_a_takeover_moves_no_level(goes_first: bool) -> None:
    """The standby counts as waking from the moment its active is lost, in whatever order that is heard."""
    them = pairs(2)
    if goes_first:
        them.goes("w1a")
        them.wait(WAKE_S - 1)
    them.comes("w1b", group="w1")
    if not goes_first:
        them.weigh("w1a", HealthStatus.UNHEALTHY)
        them.goes("w1a")
    them.wait(1)
    them.comes("w1a", group="w1", active=False)
    them.wait(300)
    assert them.levels == [0]
    capacity = them.kept.capacity
    assert capacity is not None
    assert (capacity.carriers, capacity.waking) == (2, 0)


def test_a_standby_that_does_not_wake_counts_until_it_should_have() -> None:
    """Then a half is missing."""
    them = pairs(2)
    them.goes("w1a")
    them.wait(WAKE_S + 1)
    assert them.levels == [0]
    them.wait(40)
    assert them.levels == [0, 2]


def test_the_standby_of_doubted_weights_is_no_capacity() -> None:
    """A pair shares its weights: where they are wrong nobody wakes to right ones."""
    them = pairs(2)
    for name in ("w1a", "w1b"):
        them.weigh(name, HealthStatus.UNHEALTHY, quarantined=True)
    them.wait(5)
    capacity = them.kept.capacity
    assert capacity is not None
    assert (capacity.carriers, capacity.waking) == (1, 0)


# -- spares


def test_spares_are_kept_for_each_model() -> None:
    """A model with one worker keeps it; another's spare is not brought for its loss, which it cannot make up for."""
    them = Deployment(workers=0, spares="25%")
    for number in range(4):
        them.comes(f"a{number}", kind="a")
    them.comes("b", kind="b")
    them.wait(70)
    assert them.spares == ["a3"]
    them.settings = them.kept.settings
    them.weigh("a0", HealthStatus.UNHEALTHY)
    assert them.spares == []


def test_a_control_that_takes_over_keeps_the_spares() -> None:
    """Nothing is said or moved by the change of hands."""
    them = whole(10, "2")
    them.wait(5)
    assert them.spares == ["w09", "w10"]
    them.said.clear()
    them.restart(3)
    them.wait(300)
    assert them.said == []
    assert them.spares == ["w09", "w10"]


def test_no_spare_while_starting_and_then_at_once() -> None:
    """Whoever comes serves until all are there; then the reserve is filled without a wait."""
    them = Deployment(workers=10, spares="1")
    for number in range(9):
        them.comes(f"w{number}")
        them.wait(5)
    assert them.spares == []
    them.comes("w9")
    them.wait(2)
    assert them.spares == ["w9"]
    assert them.levels == [0]


# -- traffic


def test_what_beats_say_is_what_is_measured() -> None:
    """Full workers at a pace that keeps half of the promise; requests are as the frontends report them."""
    them = Deployment(workers=4)
    for number in range(4):
        them.comes(f"w{number}")
    for _ in range(200):
        them.tell(RequestsEnded(1, 100, 160))
    them.run([f"w{number}" for number in range(4)], streams=8, pace_ms=40.0, seconds=60)
    capacity = them.kept.capacity
    assert capacity is not None
    assert capacity.unmeasured == 0
    assert capacity.rates.requests_per_s == pytest.approx(4 * 8 / 0.04 / 160, rel=0.05)
    assert them.kept.level == level_at(capacity.ratio) == 2


def test_beats_after_a_pause_or_of_another_process_say_nothing() -> None:
    """Nobody watched meanwhile; a count that fell is another process's."""
    them = whole(1)
    for step in range(20):
        them.now_s += 10.0
        them.tell(BeatReceived("w01", 8, 10 * step))
    for step in range(100, 0, -1):
        them.now_s += 0.5
        them.tell(BeatReceived("w01", 8, step))
    them.wait(60)
    assert them.kept.level == 0


# -- anything

moves = st.tuples(
    st.sampled_from([0.0, 0.3, 3.0, 15.0]),
    st.sampled_from(["w01", "w02", "w03", "w04", "w05"]),
    st.sampled_from(["heals", "falls", "doubted", "goes", "comes", "restart", "nothing"]),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["0", "1", "20%"]), st.lists(moves, max_size=25))
def test_what_always_holds(spares: str, story: list[tuple[float, str, str]]) -> None:
    """Whatever happens, restarts among it: a level is written when and only when it changes, a spare is sound or was,
    and when all is well and stays so the deployment is whole again with its reserve."""
    them = Deployment(workers=4, spares=spares)
    for gap_s, name, what in story:
        them.wait(gap_s)
        match what:
            case "heals" | "falls" | "doubted" if name in them.facts:
                statuses = {
                    "heals": HealthStatus.HEALTHY,
                    "falls": HealthStatus.UNHEALTHY,
                    "doubted": HealthStatus.SUSPICIOUS,
                }
                them.weigh(name, statuses[what])
            case "comes" if name not in them.facts:
                them.comes(name)
            case "goes" if name in them.facts:
                them.goes(name)
            case "restart":
                them.restart(gap_s)
        if them.written is not None:
            assert them.written.level == them.kept.level or them.kept._degradation is None
        assert len(them.spares) <= 1
    for number in range(1, 6):
        name = f"w{number:02}"
        them.weigh(name, HealthStatus.HEALTHY) if name in them.facts else them.comes(name)
    for _ in range(40):  # sixteen times the longest wait, twice
        them.now_s += 60.0
        them.tell(DeadlineReached())
    assert them.kept.level == 0
    assert len(them.spares) == (0 if spares == "0" else 1)


# -- stories, read as text


class Story(Deployment):
    """Plays commands, and tells what is written."""

    def play(self, command: str) -> list[str]:
        word, *words = command.split()
        before = len(self.said)
        values = dict(one.split("=") for one in words if "=" in one)
        getattr(self, f"do_{word}")([one for one in words if "=" not in one], values)
        return [f"  {at_s - 1000.0:6.1f}  {self.line(effect)}" for at_s, effect in self.said[before:]]

    def line(self, effect: LevelEffect) -> str:
        match effect:
            case SpareChanged():
                return f"{effect.name} {'is a spare' if effect.spare else 'serves'}: {effect.reason}"
            case WriteLevel():
                return f"level {effect.record.level}: {effect.record.reason}"

    def do_promise(self, words: list[str], values: dict[str, str]) -> None:
        rate, workers = float(values["requests_per_s"]), int(values["workers"])
        Deployment.__init__(self, workers=workers, spares=values.get("spares", "0"), rate=rate)

    def do_comes(self, words: list[str], values: dict[str, str]) -> None:
        for name in words:
            self.comes(name, group=values.get("group", ""), active=values.get("active") != "no")

    def do_falls(self, words: list[str], values: dict[str, str]) -> None:
        for name in words:
            self.weigh(name, HealthStatus.UNHEALTHY)

    def do_returns(self, words: list[str], values: dict[str, str]) -> None:
        for name in words:
            self.weigh(name, HealthStatus.HEALTHY)

    def do_goes(self, words: list[str], values: dict[str, str]) -> None:
        for name in words:
            self.goes(name)

    def do_wait(self, words: list[str], values: dict[str, str]) -> None:
        self.wait(float(words[0]))

    def do_run(self, words: list[str], values: dict[str, str]) -> None:
        self.run(words, int(values["streams"]), float(values["pace_ms"]), int(values["seconds"]))

    def do_restart(self, words: list[str], values: dict[str, str]) -> None:
        self.restart(float(words[0]))


@stories("levels", least=2)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every transcript's answers are exactly those the keeper gives."""
    must_go_as_written(path, Story)
