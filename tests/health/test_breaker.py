"""The breaker's promises, for any order of events, and the defects it must not have (facts 13)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import Code
from holdfast.core.ports import DeadlineReached
from holdfast.health.breaker import (
    JITTER_MAX,
    OPEN_S_MAX,
    RATE_ATTEMPTS_MIN,
    RATE_FAILURES_MIN,
    RATE_MIN,
    WINDOW_S,
    WINDOW_SLOT_S,
    Attempts,
    Breaker,
    BreakerClosed,
    BreakerEffect,
    BreakerEvent,
    BreakerLimits,
    BreakerOpened,
    BreakerRecord,
    BreakerState,
    CanaryAnswered,
    FailureKind,
    Renewed,
    SendTrialCanary,
    classify_failure,
)


def breaker(**limits: int) -> Breaker:
    return Breaker("w", lambda: 0.0, BreakerLimits(**limits))


def fail(count: int = 1) -> Attempts:
    return Attempts(failed={FailureKind.STALLED: count})


def half_open(canaries: int = 1) -> tuple[Breaker, tuple[BreakerEffect, ...]]:
    """A breaker whose rest is just over, and what it asked for; at 60 s."""
    made = breaker(canaries=canaries)
    made.step(fail(3), 0.0)
    return made, made.step(DeadlineReached(), 60.0)


# -- the defects of facts 13, each by name


@pytest.mark.parametrize("canaries", [1, 2, 5])
def test_half_open_admits_exactly_its_budget(canaries: int) -> None:
    """As many canaries are asked for as were set, no tick or answer asks for more, and customers are not admitted."""
    made, asked = half_open(canaries)
    assert asked == tuple(SendTrialCanary(number) for number in range(1, canaries + 1))
    for number in range(1, canaries + 1):
        assert made.state is BreakerState.HALF_OPEN
        assert not made.admits
        assert made.step(DeadlineReached(), 61.0) == ()
        assert made.step(Attempts(succeeded=100), 61.0) == ()
        last = made.step(CanaryAnswered(number, passed=True), 61.0)
    assert [type(effect) for effect in last] == [BreakerClosed]


@pytest.mark.parametrize(
    ("code", "tokens", "finish", "kind"),
    [
        (None, 12, None, FailureKind.TRUNCATED),
        (Code.STREAM_INCOMPLETE, 12, None, FailureKind.TRUNCATED),
        (None, 0, "stop", FailureKind.ZERO_TOKENS),
        (None, 0, "length", FailureKind.ZERO_TOKENS),
        (Code.RESPONSE_TIMEOUT, 12, None, FailureKind.STALLED),
        (Code.DISCONNECTED, 12, None, FailureKind.DISCONNECTED),
        (Code.CANNOT_CONNECT, 0, None, FailureKind.DISCONNECTED),
        (Code.CONNECTION_TIMEOUT, 0, None, FailureKind.TIMEOUT),
        (Code.ENGINE_SHUTDOWN, 3, None, FailureKind.ENGINE_ERROR),
        ("SomethingNew", 3, None, FailureKind.ENGINE_ERROR),
    ],
)
def test_a_truncated_stream_a_zero_token_200_and_a_stall_count(
    code: str | None, tokens: int, finish: str | None, kind: FailureKind
) -> None:
    """Each counts, and three of any of them in a row open the breaker."""
    assert classify_failure(code, tokens=tokens, finish=finish) is kind
    made = breaker()
    assert isinstance(made.step(Attempts(failed={kind: 3}), 0.0)[0], BreakerOpened)


def test_a_whole_answer_and_one_handed_back_are_no_failures() -> None:
    """An answer that ended, and a request that a worker gave back because it was told to stop."""
    assert classify_failure(None, tokens=1, finish="stop") is None
    assert classify_failure(Code.ENGINE_SHUTDOWN, tokens=3, finish=None, handed_back=True) is None


def test_every_name_of_a_failure_is_judged() -> None:
    """No code is the worker's fault only because nobody thought of it."""
    blamed = {code for code in Code if classify_failure(code, tokens=1, finish=None) is not None}
    assert blamed == {
        Code.CANNOT_CONNECT,
        Code.DISCONNECTED,
        Code.CONNECTION_TIMEOUT,
        Code.RESPONSE_TIMEOUT,
        Code.STREAM_INCOMPLETE,
        Code.EMPTY_ANSWER,
        Code.ENGINE_SHUTDOWN,
    }


# -- more of its promises


def test_a_broken_answer_of_a_canary_counts_once() -> None:
    """Answers that nobody asked for, that come twice, or after the breaker opened again, change nothing."""
    made, _ = half_open()
    assert made.step(CanaryAnswered(7, passed=True), 61.0) == ()
    assert isinstance(made.step(CanaryAnswered(1, passed=False), 61.0)[0], BreakerOpened)
    assert made.step(CanaryAnswered(1, passed=True), 62.0) == ()
    assert made.state is BreakerState.OPEN


def test_a_fresh_load_is_not_held_responsible() -> None:
    """Another process, or fresh weights, begin closed and with a short rest, whatever the old ones did."""
    made, _ = half_open()
    made.step(CanaryAnswered(1, passed=False), 61.0)
    assert [type(effect) for effect in made.step(Renewed(), 70.0)] == [BreakerClosed]
    opened = made.step(fail(3), 71.0)[0]
    assert isinstance(opened, BreakerOpened)
    assert opened.pause_s == 60.0


def test_rests_are_jittered_and_never_shorter_than_set() -> None:
    """Workers that open together are not tried together."""
    rests = []
    for draw in (0.0, 0.5, 0.999):
        effect = Breaker("w", lambda draw=draw: draw).step(fail(3), 0.0)[0]
        assert isinstance(effect, BreakerOpened)
        rests.append(effect.pause_s)
    assert rests[0] == 60.0
    assert rests == sorted(set(rests))
    assert rests[-1] < 60.0 * (1 + JITTER_MAX)


def test_a_record_from_another_clock_does_not_rest_for_ever() -> None:
    """Whatever time was written down, the rest that is left is no longer than the longest."""
    made = breaker()
    made.restore(BreakerRecord(BreakerState.OPEN, "why", until_s=1e12, rest_s=60.0), 1000.0)
    assert made.next_deadline_s is not None
    assert made.next_deadline_s - 1000.0 <= OPEN_S_MAX * (1 + JITTER_MAX)


# -- any order of events, beside a model that remembers everything


class Keeper:
    """Feeds a breaker, and says by itself what must come of it."""

    def __init__(self, canaries: int) -> None:
        self.limits = BreakerLimits(canaries=canaries)
        self.breaker = Breaker("w", lambda: 0.5, self.limits)
        self.now = 1000.0
        self.history: list[tuple[float, int, int]] = []  # since it closed: time, succeeded, failed
        self.asked: list[int] = []
        self.opened_s = 0.0

    def feed(self, event: BreakerEvent) -> None:
        before = self.breaker.state
        if isinstance(event, Attempts) and before is BreakerState.CLOSED:
            self.history.append((self.now, event.succeeded, sum(event.failed.values())))
        effects = self.breaker.step(event, self.now)
        asks = [effect.number for effect in effects if isinstance(effect, SendTrialCanary)]
        after = self.breaker.state
        assert (after is BreakerState.CLOSED) == self.breaker.admits == (self.breaker.next_deadline_s is None)
        if before is BreakerState.CLOSED and isinstance(event, Attempts):
            assert (after is BreakerState.OPEN) == self.must_open()
        if asks:
            assert (before, after, len(asks)) == (BreakerState.OPEN, BreakerState.HALF_OPEN, self.limits.canaries)
            assert self.now - self.opened_s >= self.limits.open_s
            assert not set(asks) & set(self.asked)
            self.asked += asks
        for effect in effects:
            if isinstance(effect, BreakerOpened):
                assert before is not BreakerState.OPEN
                assert self.limits.open_s <= effect.pause_s <= OPEN_S_MAX * (1 + JITTER_MAX)
                self.opened_s, self.history = self.now, []
        if before is BreakerState.OPEN:
            assert after is not BreakerState.CLOSED or isinstance(event, Renewed)
        if before is not BreakerState.CLOSED and isinstance(event, Attempts):
            assert (effects, after) == ((), before)

    def must_open(self) -> bool:
        if not self.history or not self.history[-1][2]:
            return False
        run = 0
        for _, succeeded, failed in reversed(self.history):
            if succeeded:
                break
            run += failed
        oldest = int(self.now // WINDOW_SLOT_S) - WINDOW_S / WINDOW_SLOT_S
        recent = [row for row in self.history if row[0] // WINDOW_SLOT_S > oldest]
        failed = sum(row[2] for row in recent)
        attempts = failed + sum(row[1] for row in recent)
        rate = failed >= RATE_FAILURES_MIN and attempts >= RATE_ATTEMPTS_MIN and failed >= RATE_MIN * attempts
        return run >= self.limits.failures or rate

    def restart(self) -> None:
        """Another process goes on; one that is closed may have forgotten what was counted, and nothing else."""
        record, admitted = self.breaker.record(), self.breaker.admits
        self.breaker = Breaker("w", lambda: 0.5, self.limits)
        self.breaker.restore(record, self.now)
        assert self.breaker.admits == admitted
        self.history = []


events = st.one_of(
    st.tuples(st.just("attempts"), st.tuples(st.integers(0, 12), st.integers(0, 2))),
    st.tuples(st.just("attempts"), st.tuples(st.integers(0, 12), st.integers(0, 2))),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 4.0, 20.0, 70.0, 700.0])),
    st.tuples(st.just("canary"), st.tuples(st.integers(-2, 0), st.booleans())),
    st.tuples(st.just("renewed"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=80), st.integers(1, 3))
def test_no_order_of_events_breaks_its_promises(story: list[tuple[str, object]], canaries: int) -> None:
    """It opens exactly on a run or a rate, rests, asks for exactly its canaries, and is closed by nothing else; and
    when all is well again it closes."""
    keeper = Keeper(canaries)
    for kind, value in story:
        if kind == "attempts":
            succeeded, failed = value  # type: ignore[misc]
            keeper.feed(Attempts(succeeded, {FailureKind.STALLED: failed}))
        elif kind == "wait":
            assert isinstance(value, float)
            keeper.now += value
            keeper.feed(DeadlineReached())
        elif kind == "canary":
            back, passed = value  # type: ignore[misc]
            number = (keeper.asked[-1] if keeper.asked else 1) + back
            keeper.feed(CanaryAnswered(number, passed))
        elif kind == "renewed":
            keeper.feed(Renewed())
            keeper.history = []
        else:
            keeper.restart()
    # The healed phase: canaries pass.
    for _ in range(3):
        if keeper.breaker.next_deadline_s is not None:
            keeper.now = max(keeper.now, keeper.breaker.next_deadline_s)
            keeper.feed(DeadlineReached())
        for number in keeper.asked[-canaries:]:
            keeper.feed(CanaryAnswered(number, passed=True))
    assert keeper.breaker.admits
