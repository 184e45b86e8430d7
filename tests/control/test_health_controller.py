"""All workers' health together: who hears of what, that nothing is forgotten or done twice, for any order of events."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control import health_controller as hc
from holdfast.control.health_controller import LEFT_MAX
from holdfast.control.questions import COUNT, TOKENS, questions_of
from holdfast.control.worker_health import FOUND_BY_S, RELOAD_S, RELOAD_S_MAX
from holdfast.core.ports import DeadlineReached
from holdfast.health import breaker as b
from holdfast.health import expectations as x
from holdfast.health import standing as s
from holdfast.health.breaker import FailureKind
from holdfast.health.device_faults import fault_of
from holdfast.health.liveness import Liveness, LivenessChanged
from holdfast.health.records import HealthRecord
from tests.rigs.worlds.health import KEY, HealthRig, Worker

ACTIONS = (hc.AskWorker, hc.ReloadWeights, hc.FlagAnswers, hc.ForgetWorker, hc.Notice)


def serving(*names: str, verified: bool = False) -> HealthRig:
    """Workers of their own weights, found while they serve, and checked."""
    made = HealthRig({name: f"w{name}" for name in names}, verified=verified)
    made.begin(serving=True)
    made.wait(1.0)
    return made


def rotten(*names: str) -> HealthRig:
    """The first of them answers wrongly, and was found out."""
    made = serving(*names)
    made.workers[names[0]].shift = 7
    made.wait(40.0)
    assert made.quarantined() == {names[0]}
    return made


# -- what nobody knows alone


def stopped_twice(*names: str) -> HealthRig:
    """Of three whose canaries are so dear that they come once in half an hour, these were stopped twice, for a second
    each, and run again: each owes two canaries, one of them with no traffic."""
    made = HealthRig({name: f"w{name}" for name in ("a", "b", "c")})
    for each in made.workers.values():
        each.took_s = 2.0
    made.begin(serving=True)
    made.wait(60.0)
    for again in (False, True):
        for before, after in (
            (Liveness.ALIVE, Liveness.STOPPED),
            (Liveness.STOPPED, Liveness.ALIVE),
        ):
            for name in names:
                made.tell(hc.LivenessReported(name, LivenessChanged(before, after, "by the kernel's word")))
            made.wait(1.0)
        made.wait(0.0 if again else 10.0)
    return made


def test_what_a_worker_owes_is_asked_for_however_dear_it_is() -> None:
    """It has no traffic that a canary could cost: it is back half a minute after its fall, and not before."""
    made = stopped_twice("a")
    made.wait(20.0)
    assert made.standings["a"].owed == 2
    made.wait(15.0)
    assert made.standings["a"].weight == 0.5


def test_who_owes_is_asked_at_once_where_nobody_else_can_serve() -> None:
    """A machine that slept twice is not down for as long as canaries are apart."""
    made = stopped_twice("a", "b", "c")
    made.wait(5.0)
    assert {standing.weight for standing in made.standings.values()} == {0.5}


def test_a_quarantine_asks_for_a_load_once_and_again_after_its_time() -> None:
    """Not at a restart of whoever asks, nor at another wrong answer; until the load is there."""
    made = rotten("a", "b", "c")
    assert [(each.path, each.load, each.in_place) for each in made.of(hc.ReloadWeights)] == [("a", 1, False)]
    for _ in range(3):
        made.restart()
    made.wait(RELOAD_S - 10.0)
    assert len(made.of(hc.ReloadWeights)) == 1
    made.wait(10.0 + 0.2 * RELOAD_S)
    assert len(made.of(hc.ReloadWeights)) == 2
    made.workers["a"].shift = 0
    made.reload("a")
    made.wait(10 * RELOAD_S)
    assert len(made.of(hc.ReloadWeights)) == 2
    assert made.standings["a"].weight == 1.0


@pytest.mark.parametrize("loads", [False, True])
def test_loads_that_do_not_help_are_asked_for_ever_more_seldom(loads: bool) -> None:
    """Whether none comes, or each is as wrong as the last: after a minute, two, four, up to half an hour and a fifth,
    also over restarts."""
    made = rotten("a", "b", "c")
    times: list[float] = []
    while made.now < 2 * 3600.0:
        if len(made.of(hc.ReloadWeights)) > len(times):
            times.append(made.now)
            if loads:
                made.reload("a")  # as wrong as before: its shift stays
            made.restart()
        made.wait(20.0)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    for place, pause_s in enumerate(pauses):
        least_s = min(RELOAD_S * 2**place, RELOAD_S_MAX)
        # What was loaded again and is wrong again is found out by its next checks, after its time has come.
        assert least_s - 20.0 <= pause_s <= 1.2 * least_s + (150.0 if loads else 40.0), pauses
    assert len(pauses) >= 6
    assert made.record("a").reloads == len(times)


def test_weights_that_were_verified_in_a_dispute_are_verified_again_when_they_are_convicted() -> None:
    """Without the wait between two requests: until the answer comes, a sound standby with these weights is idle."""
    made = HealthRig({"a": "w1", "a2": "w1", "b": "w2"})
    made.workers["a2"].active = False
    made.workers["a"].group = made.workers["a2"].group = "g"
    made.workers["a"].shift = 7
    made.begin(serving=True)
    made.wait(1.0)
    assert [each.path for each in made.of(hc.ReloadWeights)] == ["a"], "nobody knows who is right"
    made.tell(hc.WeightsVerified("a", 1))
    made.workers["c"] = Worker("w3")
    made.begin("c", serving=True)
    made.wait(40.0)
    assert made.quarantined() == {"a", "a2"}
    assert [each.path for each in made.of(hc.ReloadWeights)] == ["a", "a"]
    made.tell(hc.WeightsVerified("a", 1))
    assert made.quarantined() == {"a"}
    assert [each.path for each in made.of(hc.HandOverToStandby)] == ["a"]


def test_a_dispute_ends_when_the_process_that_was_wrong_is_gone() -> None:
    """Its successor has the same weights and answers rightly: the question is asked again, though others are known."""
    made = HealthRig({"a": "w1", "b": "w2"})
    made.workers["a"].shift, made.workers["a"].only = 7, 1
    made.begin(serving=True)
    made.wait(10.0)
    assert {standing.weight for standing in made.standings.values()} == {0.5}, "in dispute"
    made.workers["a"].shift = 0
    made.wait(70.0)
    assert {standing.weight for standing in made.standings.values()} == {1.0}


def test_an_engine_that_says_it_fails_hands_over_though_its_clients_have_some_tokens() -> None:
    """It fails every request after its first tokens, and the canaries too: nothing of that is an excuse."""
    made = HealthRig({"a": "w1", "a2": "w1"})
    made.workers["a2"].active = False
    made.workers["a"].group = made.workers["a2"].group = "g"
    made.begin(serving=True)
    made.wait(1.0)
    made.workers["a"].how = "fails"
    made.tell(hc.AttemptsReported("a", b.Attempts(failed={FailureKind.ENGINE_ERROR: 1}), tokens=1))
    for _ in range(12):
        made.wait(1.0)
        made.tell(hc.AttemptsReported("a", b.Attempts(), tokens=1))
    assert [each.path for each in made.of(hc.HandOverToStandby)] == ["a"]


def test_only_a_check_against_what_stood_expected_shows_that_a_worker_was_right() -> None:
    """Not one whose expectation was withdrawn by the very answer, nor those that nothing can be compared with after
    it: what is flagged begins at the last answer that was known to be right."""
    made = HealthRig({"a": "wa"}, verified=True)
    made.begin(serving=True)
    made.wait(40.0)
    loaded_s = made.now
    made.workers["b"] = Worker("wb", shift=7)
    made.begin("b", serving=True)
    made.wait(70.0)
    assert not made.quarantined()  # one word against another's
    assert made.standings["b"].good_s > loaded_s + 30.0
    made.workers["c"] = Worker("wc")
    made.begin("c")
    made.wait(70.0)
    assert [(each.path, each.since_s) for each in made.of(hc.FlagAnswers)] == [("b", loaded_s)]


def test_right_answers_beside_wrong_ones_do_not_show_that_a_worker_was_right() -> None:
    """Rot that moves one answer of several: checks with the others pass, and what is flagged begins before the first
    wrong one all the same, also where those who could bear witness are slow to."""
    made = serving("a", "b", "c")
    made.wait(40.0)
    right_s = max(now for now, name, _ in made.asks if name == "a")
    made.workers["a"].shift, made.workers["a"].only = 7, 1
    for name in "bc":
        made.workers[name].how = "silent"
    made.wait(70.0)
    assert made.standings["a"].good_s > right_s
    for name in "bc":
        made.workers[name].how = "answers"
    made.wait(60.0)
    assert [(each.path, each.since_s) for each in made.of(hc.FlagAnswers)] == [("a", right_s)]


def test_a_device_that_is_said_to_be_cleared_later_can_fail_before_that() -> None:
    """Another machine's clock may be years ahead: a fault that comes now is one."""
    made = serving("a", "b")
    made.workers["a"].device = "host/1"
    made.begin("a")
    made.tell(hc.DeviceRead("host/1", s.DeviceReport(None, made.now + 1e9)))
    made.wait(1.0)
    made.tell(hc.DeviceRead("host/1", s.DeviceReport(fault_of("0000:3b:00", 79), made.now)))
    assert made.standings["a"].weight == 0.0


def test_a_worker_is_slow_beside_its_own_set_only() -> None:
    """Another model's, or another device's, workers are no measure; and a set alone of one has none."""
    made = serving("a", "b", "c")
    other = replace(made.facts("a"), model="card-2", name="x", weights="wx")
    made.workers["x"] = Worker("wx")
    made.tell(hc.WorkerFound("x", other, serving=True))
    for _ in range(20):
        made.wait(1.0)
        made.tell(hc.PacesMeasured({"a": 1.0, "b": 1.0, "c": 1.0, "x": 50.0}))
    assert made.standings["x"].weight == 1.0


def test_a_late_word_of_an_earlier_load_changes_nothing() -> None:
    """A worker that loaded again is not taken back to the weights that were convicted."""
    made = rotten("a", "b", "c")
    before = made.facts("a")
    made.workers["a"].shift = 0
    made.reload("a")
    made.wait(10.0)
    made.tell(hc.WorkerFound("a", before))
    assert made.standings["a"].weight == 1.0


def test_other_weights_in_the_same_process_are_a_fresh_load_whatever_their_number() -> None:
    """An engine that maps another vault begins to count anew."""
    made = rotten("a", "b", "c")
    made.workers["a"] = Worker("another", load=1)
    made.begin("a")
    made.wait(1.0)
    assert made.standings["a"].weight == 1.0


def test_a_worker_that_says_little_of_itself_is_kept_too() -> None:
    """An older version names no weights and no load: they are its own, and its first."""
    made = HealthRig({"a": "", "b": ""})
    made.workers["a"].load = made.workers["b"].load = 0
    made.begin()
    made.wait(1.0)
    assert {made.record(name).weights for name in "ab"} == {"a", "b"}
    assert all(standing.weight == 1.0 for standing in made.standings.values())


# -- records


def test_what_is_expected_of_kinds_that_are_gone_is_not_kept_for_ever() -> None:
    """Of builds that came and went the last few are kept, by when their last worker left, also over restarts; that of
    workers who are there, or are yet to be found, stays however old it is."""
    made = serving("a", "b")
    (own,) = made.expected
    for count in range(2 * LEFT_MAX):
        made.workers["x"] = Worker("wx")
        made.tell(hc.WorkerFound("x", replace(made.facts("x"), build=f"build-{count}"), serving=True))
        made.wait(60.0)
        del made.workers["x"]
        made.tell(hc.WorkerLost("x", "its process ended"))
        if count % 5 == 0:
            made.restart()
    made.wait(60.0)
    records = [msgspec.json.decode(record, type=x.ExpectationsRecord) for record in made.expected.values()]
    assert own in made.expected
    assert {one.key.build for one in records} - {KEY.build} == {f"build-{n}" for n in range(LEFT_MAX, 2 * LEFT_MAX)}


def test_the_dead_are_forgotten_and_not_too_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour, or the oldest first: a worker that cannot start dies all day."""
    monkeypatch.setattr(hc, "DEAD_MAX", 8)
    made = serving("a")
    for count in range(8 + 4):
        name = f"dying-{count}"
        made.workers[name] = Worker(name)
        made.begin(name)
        del made.workers[name]
        made.tell(hc.WorkerLost(name, "its process ended"))
    made.wait(100.0)
    assert len(made.store) == 8 + 1
    assert "dying-0" not in made.store
    made.wait(3600.0)
    assert set(made.store) == set(made.standings) == {"a"}


def test_who_stands_in_the_store_is_not_dead_because_control_cannot_reach_it() -> None:
    """Its frontends may; and when its key is gone, it is."""
    made = serving("a", "b")
    del made.workers["b"]
    made.restart()
    made.tell(hc.WorkerListed("b"))
    made.wait(10 * FOUND_BY_S)
    assert (made.standings["b"].weight, made.standings["b"].fall) == (1.0, 0)
    made.tell(hc.WorkerLost("b", "it left the store"))
    assert made.standings["b"].status is s.HealthStatus.DEAD


def crawler(*others: str) -> HealthRig:
    """`a` was found to crawl beside others, and is drained."""
    made = serving("a", *others)
    made.workers["a"].factor = 20.0
    for _ in range(12):
        made.tell(hc.PacesMeasured({"a": 20.0, **dict.fromkeys(others, 1.0)}))
        made.wait(1.0)
    assert made.standings["a"].status is s.HealthStatus.DRAINING
    return made


def test_the_last_of_a_set_serves_however_slow_it_is() -> None:
    """Drained beside another, and then alone: slow answers are better than none."""
    made = crawler("b")
    made.wait(20.0)
    assert made.standings["a"].weight == 0.0
    made.tell(hc.WorkerLost("b", "its process ended"))
    made.wait(10.0)
    assert made.standings["a"].weight > 0.0
    made.wait(60.0)
    assert made.standings["a"].status is s.HealthStatus.HEALTHY


def test_one_that_crawls_serves_where_the_others_have_no_traffic_either() -> None:
    """But not while a standby is about to take over from one that died."""
    made = HealthRig({"a": "wa", "b": "wb", "b2": "wb"})
    for name, group in (("b", "g"), ("b2", "g")):
        made.workers[name].group = group
    made.workers["b2"].active = False
    made.begin(serving=True)
    made.wait(1.0)
    made.workers["a"].factor = 20.0
    for _ in range(12):
        made.tell(hc.PacesMeasured({"a": 20.0, "b": 1.0}))
        made.wait(1.0)
    made.tell(hc.WorkerLost("b", "its process ended"))
    made.wait(10.0)
    assert made.standings["a"].weight == 0.0
    made.workers["b2"].active = True
    made.begin("b2")
    made.wait(20.0)
    assert made.standings["a"].weight == 0.0
    made.tell(hc.LivenessReported("b2", LivenessChanged(Liveness.ALIVE, Liveness.WEDGED, "no step")))
    made.wait(10.0)
    assert made.standings["a"].weight > 0.0


def test_a_worker_that_says_it_is_of_another_kind_is_compared_with_those() -> None:
    """And can be lost."""
    made = serving("a", "b")
    made.tell(hc.WorkerFound("a", replace(made.facts("a"), dtype="float32")))
    made.tell(hc.PacesMeasured({"a": 1.0, "b": 1.0}))
    made.tell(hc.WorkerLost("a", "its process ended"))
    assert made.standings["a"].status is s.HealthStatus.DEAD


def test_a_clock_that_goes_back_changes_nothing() -> None:
    """What is written down later is not of an earlier time."""
    made = serving("a", "b")
    before = dict(made.standings)
    made.controller.step(DeadlineReached(), made.now - 1000.0)
    made.tell(DeadlineReached())
    assert made.standings == before


def test_a_spare_has_no_traffic_is_asked_like_any_other_and_stays_one() -> None:
    """Promotion is one event; its standing is its own."""
    made = serving("a", "b", "c")
    made.tell(hc.SpareAssigned("a", True))
    assert (made.record("a").weight, made.standings["a"].weight) == (0.0, 1.0)
    made.restart()
    assert made.record("a").spare
    made.asks.clear()
    made.wait(40.0)
    assert "a" in {name for _, name, _ in made.asks}
    made.tell(hc.SpareAssigned("a", False))
    assert made.record("a").weight == 1.0


def test_questions_are_the_same_everywhere_and_within_the_vocabulary() -> None:
    """They follow from the card and the vocabulary; another card's are others; each is answered by the rest of it."""
    made = questions_of("card", 49152)
    assert made == questions_of("card", 49152)
    assert len(set(made) | set(questions_of("other", 49152))) == 2 * COUNT
    for vocabulary in (0, 300, 49152, 256_000):
        for question in questions_of("card", vocabulary):
            assert all(0 < token < max(vocabulary, 256) for token in question.prompt)
            assert question.tokens == TOKENS


# -- any order of events


class Watched(HealthRig):
    """A set beside a plain memory of what must not be forgotten or done twice."""

    def __init__(self, workers: dict[str, str]) -> None:
        self.out: dict[str, int] = {}  # the question that is out, by worker
        self.falls: dict[str, int] = {}
        self.convicted: set[tuple[str, int]] = set()
        self.reloads: dict[tuple[str, str, bool], float] = {}
        self.lost: set[str] = set()
        self.written: dict[str, s.WorkerStanding] = {}
        super().__init__(workers)

    def tell(self, event: hc.HealthEvent) -> None:
        first = len(self.effects)
        if isinstance(event, hc.AnswerReceived | hc.AnswerMissing | hc.CanaryRefused):
            self.out.pop(event.path, None)
        if isinstance(event, hc.WorkerLost):
            self.lost.add(event.path)
        if isinstance(event, hc.WorkerFound):
            self.lost.discard(event.path)
        super().tell(event)
        self.check(self.effects[first:])

    def check(self, effects: list[hc.HealthEffect]) -> None:
        actions = [isinstance(effect, ACTIONS) for effect in effects]
        assert actions == sorted(actions), "what is written down comes first"
        for effect in effects:
            match effect:
                case hc.AskWorker():
                    assert self.workers[effect.path].active
                    assert effect.number > self.out.get(effect.path, 0)
                    self.out[effect.path] = effect.number
                case hc.ForgetWorker():
                    assert effect.path in self.lost
                case hc.ReloadWeights():
                    # A conviction asks at once, also soon after a dispute did.
                    place = (effect.path, self.workers[effect.path].weights, self.standings[effect.path].quarantined)
                    assert self.now - self.reloads.get(place, -1e9) >= RELOAD_S - 0.001
                    self.reloads[place] = self.now
                case hc.WriteVerdict():
                    self.check_record(effect.path, effect.record)
        for path, standing in self.standings.items():
            # Who is to be asked is asked anew by whoever goes on.
            assert replace(self.written[path], asked=standing.asked) == standing, "nothing is known but what is written"
        crawling = [s.HealthCause.CRAWLING in standing.causes for standing in self.standings.values()]
        assert not crawling or not all(crawling)

    def check_record(self, path: str, record: HealthRecord) -> None:
        standing = record.standing
        name = (record.weights, record.load)
        self.written[path] = standing
        assert standing.fall >= self.falls.get(path, 0)
        self.falls[path] = standing.fall
        assert record.weight == 0.0 or not standing.quarantined or standing.last_resort
        if standing.quarantined:
            self.convicted.add(name)
        if path not in self.lost:
            assert standing.quarantined == (name in self.convicted), "one verdict on one load, for ever"

    def restart(self, *, serving: bool = False) -> None:
        self.out.clear()
        gone = set(self.store) - set(self.workers)
        super().restart(serving=serving)
        self.lost |= gone


steps = st.one_of(
    st.tuples(st.just("shift"), st.sampled_from([0, 7, 7])),
    st.tuples(st.just("how"), st.sampled_from(["answers", "answers", "silent", "lost", "refuses"])),
    st.tuples(st.just("factor"), st.sampled_from([1.0, 20.0])),
    st.tuples(st.just("pace"), st.sampled_from([1.0, 3.0, 20.0])),
    st.tuples(st.just("attempts"), st.sampled_from([0, 1, 3])),
    st.tuples(
        st.just("judged"),
        st.sampled_from([Liveness.STOPPED, Liveness.WEDGED, Liveness.PROBATION, Liveness.ALIVE]),
    ),
    st.tuples(st.just("fault"), st.sampled_from([31, 46, 79, 0])),
    st.tuples(st.sampled_from(["reload", "restart", "die", "wake", "fail", "spare"]), st.booleans()),
)
stories = st.lists(st.tuples(st.integers(0, 4), steps, st.sampled_from([0.0, 1.0, 20.0, 70.0])), max_size=25)
PAIRS = {"a": "w1", "a2": "w1", "b": "w2", "c": "w3", "d": "w4"}


def play(made: Watched, name: str, step: tuple[str, object], wait_s: float) -> None:
    kind, value = step
    worker = made.workers.get(name)
    match kind:
        case "restart":
            made.restart()
        case _ if worker is None:
            made.workers[name] = Worker(PAIRS[name], load=made.record(name).load if name in made.store else 1)
            made.begin(name)
        case "shift":
            for each in made.workers.values():
                each.shift = value if each.weights == PAIRS[name] else each.shift  # type: ignore[assignment]
        case "how" | "factor":
            setattr(worker, kind, value)
        case "pace":
            made.tell(hc.PacesMeasured({each: value if each == name else 1.0 for each in made.workers}))  # type: ignore[misc]
        case "attempts":
            made.tell(hc.AttemptsReported(name, b.Attempts(0 if value else 3, {FailureKind.STALLED: value})))  # type: ignore[dict-item]
        case "judged":
            made.tell(hc.LivenessReported(name, LivenessChanged(Liveness.SUSPECT, value, "so")))  # type: ignore[arg-type]
        case "fault" if value:
            made.tell(hc.DeviceRead("d", s.DeviceReport(fault_of("d", value), made.now)))  # type: ignore[arg-type]
        case "fault":
            made.tell(hc.DeviceRead("d", s.DeviceReport(None, made.now)))
        case "reload":
            made.reload(name)
        case "die":
            del made.workers[name]
            made.tell(hc.WorkerLost(name, "its process ended"))
        case "wake":
            worker.active = not worker.active
            made.begin(name)
        case "fail":
            made.tell(hc.EngineFailed(name, "so"))
        case "spare":
            made.tell(hc.SpareAssigned(name, bool(value)))
    made.wait(wait_s)


@settings(max_examples=25, deadline=None)
@given(stories)
def test_no_order_of_events_breaks_its_promises(story: list[tuple[int, tuple[str, object], float]]) -> None:
    """Nothing is done before it is written, a verdict on a load is one for all who read it and for ever, falls only
    grow, nobody is asked twice at once or asleep; and mended, loaded afresh and in pace, all have traffic."""
    made = Watched(PAIRS)
    made.begin(serving=True)
    for place, step, wait_s in story:
        play(made, list(PAIRS)[place], step, wait_s)
    loads = {name: made.record(name).load for name in PAIRS}
    made.workers = {name: Worker(weights, loads[name]) for name, weights in PAIRS.items()}
    made.begin()
    made.tell(hc.DeviceRead("d", s.DeviceReport(None, made.now)))
    for name in PAIRS:
        made.tell(hc.LivenessReported(name, LivenessChanged(Liveness.PROBATION, Liveness.ALIVE, "so")))
        made.tell(hc.SpareAssigned(name, False))
    made.wait(200.0)
    for name in ("a", "b", "c", "d"):
        made.reload(name)
        made.wait(20.0)
    for _ in range(30):
        made.wait(1.0)
        made.tell(hc.PacesMeasured(dict.fromkeys(PAIRS, 1.0)))
    made.wait(600.0)
    assert {name: made.record(name).weight for name in PAIRS} == dict.fromkeys(PAIRS, 1.0)
    assert msgspec.json.decode(made.store["a"], type=HealthRecord) == made.record("a")


def test_a_replacement_is_asked_for_in_the_record_that_keeps_the_last_worker_serving() -> None:
    """The next control goes on asking, without a second notice, until the worker has weight by its own merit."""
    made = HealthRig({"a": "wa"})
    made.workers["a"].device = "d1"
    made.begin(serving=True)
    made.wait(1.0)
    fault = fault_of("0000:3b:00", 79)
    made.tell(hc.DeviceRead("d1", s.DeviceReport(fault, made.now)))
    made.restart()
    made.wait(60.0)
    record = msgspec.json.decode(made.store["a"], type=HealthRecord)
    assert (record.weight, record.last_resort, record.replace) == (0.5, True, fault.reason)
    assert len([one for one in made.of(hc.Notice) if one.what is hc.NoticeKind.REPLACED]) == 1
    made.tell(hc.DeviceRead("d1", s.DeviceReport(None, made.now)))
    made.wait(60.0)
    record = msgspec.json.decode(made.store["a"], type=HealthRecord)
    assert (record.weight, record.replace, record.unfit_s) == (1.0, "", 0.0)
