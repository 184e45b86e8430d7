"""How many replicas are wanted, from what is seen of a model's traffic: up, down, to none and back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.fleet.desired import Level, Model
from holdfast.fleet.scaling import Scaling, ScalingState, Signals, bounds, next_deadline_s, step

MODEL = Model(key="a", replicas_max=4, device_bytes=1)
RULES = Scaling()
UP = [(3.0, 2), (33.0, 3), (63.0, 4)]  # one more at a time, under a sign that lasts


class Load:
    """A model under a load that a test sets, stepped every second; whoever is wanted is ready a second later."""

    def __init__(self, wanted: int = 1, model: Model = MODEL, rules: Scaling = RULES) -> None:
        self.state, self.model, self.rules, self.now_s = ScalingState(wanted=wanted), model, rules, 1000.0
        self.changes: list[tuple[float, int]] = []

    def last(self, seconds: int, **signs: float) -> list[tuple[float, int]]:
        """The changes, with the time since its beginning."""
        began_s, found = self.now_s, []
        for _ in range(seconds):
            seen = Signals(**{"ready": self.state.wanted, **signs})
            after = step(self.state, self.model, self.rules, seen, self.now_s)
            if after.wanted != self.state.wanted:
                found.append((self.now_s - began_s, after.wanted))
            self.state = after
            self.now_s += 1.0
        self.changes += found
        return found


def test_a_burst_changes_nothing() -> None:
    """A sign that comes and goes does not last."""
    load = Load()
    for _ in range(20):
        load.last(2, waiting=5, wait_s=9.0, running=8)
        load.last(1, running=8, kv_used=0.5)
    assert load.changes == []


def test_less_load_takes_one_away_at_a_time() -> None:
    """After it lasted, and down to one while anything runs."""
    assert Load(wanted=3).last(400, running=1, kv_used=0.1) == [(60.0, 2), (121.0, 1)]
    kept = msgspec.structs.replace(MODEL, floor=Level.HOT, replicas_min=2)
    assert Load(wanted=3, model=kept).last(400, running=1, kv_used=0.1) == [(60.0, 2)]


def test_between_two_steps_there_is_time_however_soon_a_sign_lasts() -> None:
    """Down a minute after the last one; up when the sign has lasted anew."""
    assert Load(wanted=3, rules=Scaling(low_s=10)).last(99, running=1, kv_used=0.1) == [(10.0, 2), (70.0, 1)]
    rules = Scaling(high_s=10, step_up_s=5)
    assert Load(rules=rules).last(25, waiting=5, wait_s=9.0, running=8) == [(10.0, 2), (21.0, 3)]


@pytest.mark.parametrize(
    ("wanted", "signs", "changes"),
    [
        pytest.param(1, {"waiting": 5, "wait_s": 9.0, "running": 8}, UP, id="requests wait: one more at a time"),
        pytest.param(1, {"waiting": 5, "wait_s": 2.0, "running": 8}, [], id="a wait as long as it may be"),
        pytest.param(1, {"wait_s": 9.0, "running": 8}, [], id="a wait that nobody has any more"),
        pytest.param(1, {"running": 8, "kv_used": 0.9}, UP, id="KV as full as it may not be"),
        pytest.param(1, {"running": 1, "kv_used": 0.95, "ready": 0}, [], id="KV of nobody who serves"),
        pytest.param(2, {"running": 8, "kv_used": 0.3}, [(60.0, 1)], id="KV that one less would just hold"),
        pytest.param(2, {"running": 8, "kv_used": 0.2, "ready": 4}, [], id="KV that is partly on those who leave"),
        pytest.param(3, {"waiting": 1, "wait_s": 1.0, "running": 1, "kv_used": 0.1}, [], id="somebody waits a little"),
        pytest.param(4, {"kv_used": 0.95}, [], id="full KV takes nobody away, though nothing runs"),
        pytest.param(2, {"running": 8, "kv_used": 0.5}, [], id="too much for one less, and not for these"),
        pytest.param(3, {"running": 8, "kv_used": 0.5, "ready": 1}, [], id="two carry nothing yet"),
        pytest.param(3, {"ready": 0}, [(300.0, 0)], id="to none at once: nothing was asked for"),
        pytest.param(3, {}, [(60.0, 2), (121.0, 1), (300.0, 0)], id="what was taken away makes it no later"),
    ],
)
def test_where_the_signs_begin(wanted: int, signs: dict[str, float], changes: list[tuple[float, int]]) -> None:
    """At their bounds, for so long that whatever is seen would have lasted."""
    assert Load(wanted=wanted).last(500, **signs) == changes


def test_to_none_and_back_with_the_request_held() -> None:
    """After a while without a request nobody is wanted; one that comes is held, and brings one at once."""
    load = Load()
    assert load.last(400) == [(300.0, 0)]
    assert load.last(1_000) == []
    assert load.last(5, waiting=1, wait_s=0.1) == [(0.0, 1)]
    assert load.state.why == "a request is held"


def test_not_to_none_while_anything_runs_or_a_floor_forbids_it() -> None:
    """A request that takes an hour keeps its replica; so does a floor that is HOT."""
    assert Load().last(3_600, running=1) == []
    kept = msgspec.structs.replace(MODEL, floor=Level.HOT, replicas_min=1)
    assert Load(model=kept).last(3_600) == []
    assert Load(rules=Scaling(idle_s=0)).last(3_600) == []


@pytest.mark.parametrize(
    ("fields", "rules", "expected"),
    [
        ({}, {}, (0, 4)),
        ({"floor": Level.HOT, "replicas_min": 2}, {}, (2, 4)),
        ({"floor": Level.WARM, "replicas_min": 2, "host_bytes": 1}, {}, (0, 4)),
        ({"devices": 2}, {"devices_max": 5}, (0, 2)),
        ({"floor": Level.HOT, "replicas_min": 3, "devices": 2}, {"devices_max": 4}, (2, 2)),
    ],
    ids=["as it is", "a HOT floor", "a WARM floor", "a budget", "a budget below the floor"],
)
def test_bounds(fields: dict[str, object], rules: dict[str, int], expected: tuple[int, int]) -> None:
    """The model's own, and its budget of devices, which wins."""
    model = msgspec.structs.replace(MODEL, **fields)
    assert bounds(model, Scaling(**rules)) == expected


def test_a_budget_holds_under_any_load() -> None:
    """Whatever waits."""
    assert Load(rules=Scaling(devices_max=2)).last(500, waiting=50, wait_s=60.0, running=9) == [(3.0, 2)]


def test_a_bound_that_changes_is_kept_to_at_once() -> None:
    """It is a person's word, and no measurement."""
    load = Load(wanted=4)
    load.model = msgspec.structs.replace(MODEL, replicas_max=2)
    assert load.last(5, running=8, kv_used=0.8) == [(0.0, 2)]
    load.model = msgspec.structs.replace(MODEL, floor=Level.HOT, replicas_min=4)
    assert load.last(5, running=8, kv_used=0.8) == [(0.0, 4)]


def test_a_budget_for_none_wants_none_though_a_request_is_held() -> None:
    """Two devices each, and one may be had."""
    pair = msgspec.structs.replace(MODEL, devices=2)
    assert Load(wanted=0, model=pair, rules=Scaling(devices_max=1)).last(9, waiting=1, wait_s=9.0) == []


SIGNS = st.builds(
    Signals,
    waiting=st.integers(0, 3),
    wait_s=st.sampled_from([0.0, 1.0, 9.0]),
    running=st.integers(0, 3),
    kv_used=st.sampled_from([0.0, 0.3, 0.7, 0.95]),
    ready=st.integers(0, 4),
)
RUN = st.lists(st.tuples(SIGNS, st.sampled_from([0.5, 2.0, 40.0, 400.0])), max_size=40)


@given(RUN, st.booleans())
def test_whatever_is_seen_the_promises_hold(run: list[tuple[Signals, float]], kept: bool) -> None:
    """Within bounds; one step at a time; to none only when nothing waits or runs; up and down no sooner than said."""
    model = msgspec.structs.replace(MODEL, floor=Level.HOT, replicas_min=1) if kept else MODEL
    state, now_s, least = ScalingState(wanted=1), 1000.0, int(kept)
    for signs, seconds in run:
        now_s += seconds
        after = step(state, model, RULES, signs, now_s)
        assert least <= after.wanted <= 4
        assert after.wanted == 0 or abs(after.wanted - state.wanted) <= 1
        if after.wanted > state.wanted >= 1:
            assert now_s - state.stepped_s >= RULES.step_up_s
        if 0 < after.wanted < state.wanted:
            assert now_s - state.stepped_s >= RULES.step_down_s
        if after.wanted == 0 < state.wanted:
            assert signs.waiting == signs.running == 0
        assert msgspec.json.decode(msgspec.json.encode(after), type=ScalingState) == after
        state = after


@given(RUN)
def test_it_says_when_to_look_again(run: list[tuple[Signals, float]]) -> None:
    """Under signs that do not change, nothing changes before the deadline that it told."""
    state, now_s = ScalingState(wanted=2), 1000.0
    for signs, seconds in run:
        now_s += seconds
        state = step(state, MODEL, RULES, signs, now_s)
        due_s = next_deadline_s(state, RULES)
        before_s = now_s + 10_000.0 if due_s is None else (now_s + due_s) / 2
        if due_s is None or due_s > now_s:
            assert step(state, MODEL, RULES, signs, before_s).wanted == state.wanted


@pytest.mark.parametrize(
    ("state", "due_s"),
    [
        (ScalingState(wanted=1), None),
        (ScalingState(wanted=1, short_since_s=1000.0), 1003.0),
        (ScalingState(wanted=1, short_since_s=1000.0, stepped_s=990.0), 1020.0),
        (ScalingState(wanted=2, ample_since_s=1000.0, stepped_s=990.0), 1060.0),
        (ScalingState(wanted=2, ample_since_s=1000.0, quiet_since_s=700.0), 1000.0),
        (ScalingState(wanted=0, quiet_since_s=700.0), None),
    ],
    ids=["no sign", "too few", "too few, just after a step", "too many", "nothing is asked for", "there is nobody"],
)
def test_when_to_look_again(state: ScalingState, due_s: float | None) -> None:
    """As soon as a sign has lasted, and the last step is long enough ago: no sooner, so that nobody looks in vain."""
    assert next_deadline_s(state, RULES) == due_s
