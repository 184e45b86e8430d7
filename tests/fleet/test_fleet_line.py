"""One model's requests and its replicas: who is given what, and what a user is told meanwhile."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.core.tiers import Tier
from holdfast.fleet.line import Line, State, Whereabouts


def line(waiting_max: int = 100) -> Line:
    return Line(waiting_max, random.Random(1))


def lease(one: Line, replica: str, credit: int = 2, term: int = 1, until_s: float = 1e9, now_s: float = 0.0) -> None:
    one.lease(replica, term=term, until_s=until_s, credit=credit, now_s=now_s)


def given(one: Line, now_s: float = 0.0) -> list[tuple[str, str]]:
    return [(each.request, each.replica) for each in one.dispatch(now_s)]


def test_a_dead_replica_does_not_win_every_pull() -> None:
    """Whoever fails a request gets no other, however free it is: ten requests, and one of them ever saw it."""
    one = line()
    lease(one, "dead", credit=1)
    one.join("0", 0.0)
    assert given(one) == [("0", "dead")]
    lease(one, "sound", credit=1)
    for number in range(1, 10):
        one.join(str(number), 0.0)
    one.failed("0", 0.0)
    served = []
    while found := given(one):
        ((request, replica),) = found
        served.append(request)
        assert replica == "sound"
        one.ended(request)
    assert served == [str(number) for number in range(10)]  # and the one that was failed stands where it stood


def test_a_lost_seat_comes_back_by_a_later_term_only() -> None:
    """Its lease is renewed in vain; whoever checks replicas gives it a new one."""
    one = line()
    lease(one, "r")
    one.join("a", 0.0)
    given(one)
    one.failed("a", 0.0)
    lease(one, "r")
    assert given(one) == []
    lease(one, "r", term=2)
    assert given(one) == [("a", "r")]
    lease(one, "r", term=1, credit=0)  # an old word, which came late
    one.join("b", 0.0)
    assert given(one) == [("b", "r")]


def test_removing_a_replica_in_mid_request_strands_nobody() -> None:
    """All that it had goes to others, before whoever waits, and in its old order."""
    one = line()
    lease(one, "old", credit=2)
    for request in ("a", "b", "c"):
        one.join(request, 0.0)
    assert given(one) == [("a", "old"), ("b", "old")]
    one.began("a")
    assert one.remove("old") == ["a", "b"]
    assert one.whereabouts("a", 0.0) == Whereabouts(State.PROVISIONING, 1)
    lease(one, "new", credit=3)
    assert given(one) == [("a", "new"), ("b", "new"), ("c", "new")]
    assert one.whereabouts("a", 0.0) == Whereabouts(State.DISPATCHED, 0, "new")  # and has made no token there


def test_the_slowest_replica_does_not_delay_the_first_answer() -> None:
    """The first that is ready serves at once, whoever is still coming."""
    one = line()
    one.join("a", 0.0)
    assert one.whereabouts("a", 0.0) == Whereabouts(State.PROVISIONING, 1)
    lease(one, "first")
    assert given(one) == [("a", "first")]


def test_scaled_up_replicas_get_traffic() -> None:
    """Whoever joins is given what waits, without a word to anybody."""
    one = line()
    lease(one, "r1", credit=1)
    for request in ("a", "b", "c"):
        one.join(request, 0.0)
    assert given(one) == [("a", "r1")]
    lease(one, "r2", credit=1)
    lease(one, "r3", credit=1)
    assert {replica for _, replica in given(one)} == {"r2", "r3"}


def test_a_replica_has_as_many_requests_as_its_credit() -> None:
    """Not one at a time, and not more."""
    one = line()
    lease(one, "r", credit=3)
    for request in "abcde":
        one.join(request, 0.0)
    assert len(given(one)) == 3
    one.ended("a")
    assert given(one) == [("d", "r")]


def test_work_is_given_while_a_lease_is_fresh() -> None:
    """A replica that nobody has heard of since is given nothing; what it has, it keeps."""
    one = line()
    lease(one, "r", until_s=10.0)
    one.join("a", 0.0)
    assert given(one, 9.9) == [("a", "r")]
    one.join("b", 9.9)
    assert given(one, 10.0) == []
    assert one.whereabouts("a", 10.0) == Whereabouts(State.DISPATCHED, 0, "r")
    lease(one, "r", until_s=20.0, now_s=11.0)
    assert given(one, 11.0) == [("b", "r")]


def test_a_user_sees_place_and_state() -> None:
    """Of each request, from its coming to its end."""
    one = line()
    for request, tier in (("a", Tier.STANDARD), ("b", Tier.STANDARD), ("c", Tier.PREMIUM)):
        one.join(request, 0.0, tier)
    assert list(one.waiters(0.0)) == ["c", "a", "b"]
    assert one.whereabouts("b", 0.0) == Whereabouts(State.PROVISIONING, 3)
    lease(one, "r", credit=1)
    given(one)
    assert one.whereabouts("b", 0.0) == Whereabouts(State.QUEUED, 2)
    assert one.whereabouts("c", 0.0) == Whereabouts(State.DISPATCHED, 0, "r")
    one.began("c")
    assert one.whereabouts("c", 0.0) == Whereabouts(State.RUNNING, 0, "r")
    one.ended("c")
    assert one.whereabouts("c", 0.0) is None


def test_the_line_is_bounded() -> None:
    """A full line refuses the last who comes, or pushes out a lower tier; never one that a replica had."""
    one = line(waiting_max=2)
    lease(one, "r", credit=1)
    one.join("ran", 0.0)
    given(one)
    assert [one.join(request, 1.0) for request in ("a", "b", "c")] == [None, None, "c"]
    assert one.whereabouts("c", 1.0) is None
    assert one.first_since_s() == 1.0
    assert one.join("d", 1.0, Tier.PREMIUM) == "b"
    one.remove("r")
    assert list(one.waiters(1.0)) == ["ran", "d", "a"]
    assert one.first_since_s() == 0.0


def test_however_many_are_handed_on_none_is_refused() -> None:
    """Three that ran stand before one that waits, in a line for one, in the order in which they came."""
    one = line(waiting_max=1)
    lease(one, "r", credit=3)
    for number, request in enumerate("abc"):
        one.join(request, float(number))
        given(one)
    one.join("d", 3.0)
    one.failed("b", 4.0)
    one.failed("a", 4.0)
    one.remove("r")
    assert list(one.waiters(4.0)) == ["a", "b", "c", "d"]


def test_whoever_leaves_while_it_waits_leaves_the_line() -> None:
    """One that never ran, and one that did."""
    one = line()
    lease(one, "r", credit=1)
    for request in ("ran", "a", "b"):
        one.join(request, 0.0)
    given(one)
    one.remove("r")
    one.ended("ran")
    one.ended("a")
    assert list(one.waiters(0.0)) == ["b"]


def test_whoever_waits_for_a_replica_that_nobody_hears_of_waits_for_another_to_come() -> None:
    """A seat alone does not serve."""
    one = line()
    lease(one, "r", until_s=10.0)
    one.join("a", 10.0)
    assert one.whereabouts("a", 10.0) == Whereabouts(State.PROVISIONING, 1)


def test_requests_weigh_what_they_cost() -> None:
    """Beside one long prompt there are three short ones, not one."""
    one = line()
    lease(one, "x", credit=9)
    lease(one, "y", credit=9)
    one.join("long", 0.0, tokens=list(range(1_000)))
    ((_, busy),) = given(one)
    for number in range(3):
        one.join(f"short{number}", 0.0, tokens=[number], output=10)
    assert {replica for _, replica in given(one)} == {"x", "y"} - {busy}
    one.ended("long")
    one.join("next", 0.0)
    assert given(one) == [("next", busy)]


def test_a_prompt_goes_where_its_prefix_is_known() -> None:
    """Though another replica has less to do: what is known is work saved."""
    one, tokens = line(), list(range(200))
    lease(one, "knows", credit=9)
    one.join("first", 0.0, tokens=tokens)
    one.join("small", 0.0, output=9)
    given(one)
    one.ended("first")
    lease(one, "free", credit=9)
    one.join("again", 0.0, tokens=[*tokens, 7])
    assert given(one) == [("again", "knows")]
    one.join("other", 0.0, tokens=tokens[::-1])
    assert given(one) == [("other", "free")]


class LineModel(RuleBasedStateMachine):
    """A line against what must be true of it, counted anew."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.now_s, self.count = line(waiting_max=5), 0.0, 0
        self.on: dict[str, str] = {}  # request -> replica
        self.waits: set[str] = set()
        self.seats: dict[str, tuple[int, float, int]] = {}  # term, until, credit
        self.lost: set[str] = set()

    @rule(tier=st.sampled_from(list(Tier)))
    def join(self, tier: Tier) -> None:
        self.count += 1
        self.waits.add(str(self.count))
        refused = self.line.join(str(self.count), self.now_s, tier)
        self.waits.discard(refused or "")

    @rule(replica=st.sampled_from("xyz"), credit=st.integers(0, 3), seconds=st.integers(1, 9), newer=st.booleans())
    def lease(self, replica: str, credit: int, seconds: int, newer: bool) -> None:
        term = self.seats.get(replica, (1, 0.0, 0))[0] + newer
        self.seats[replica] = (term, self.now_s + seconds, credit)
        if newer:
            self.lost.discard(replica)
        self.line.lease(replica, term=term, until_s=self.now_s + seconds, credit=credit, now_s=self.now_s)

    @rule(replica=st.sampled_from("xyz"))
    def remove(self, replica: str) -> None:
        theirs = {request for request, where in self.on.items() if where == replica}
        assert set(self.line.remove(replica)) == theirs
        self.waits |= theirs
        self.on = {request: where for request, where in self.on.items() if where != replica}
        self.seats.pop(replica, None)
        self.lost.discard(replica)

    @rule(pick=st.integers(0, 99), fails=st.booleans(), began=st.booleans())
    def end(self, pick: int, fails: bool, began: bool) -> None:
        if self.on:
            request = list(self.on)[pick % len(self.on)]
            if began:
                self.line.began(request)
            if fails:
                self.lost.add(self.on.pop(request))
                self.line.failed(request, self.now_s)
                self.waits.add(request)
            else:
                del self.on[request]
                self.line.ended(request)

    @rule(seconds=st.integers(0, 5))
    def dispatch(self, seconds: int) -> None:
        self.now_s += seconds
        for each in self.line.dispatch(self.now_s):
            assert self.may_work(each.replica)
            self.waits.remove(each.request)
            self.on[each.request] = each.replica
        full = [replica for replica in self.seats if self.may_work(replica)]
        assert not self.waits or all(self.load(replica) >= self.seats[replica][2] for replica in full)

    def may_work(self, replica: str) -> bool:
        return replica not in self.lost and self.now_s < self.seats[replica][1]

    def load(self, replica: str) -> int:
        return list(self.on.values()).count(replica)

    @invariant()
    def the_books_agree(self) -> None:
        """What the table counts of a replica are its requests, and those of them that have made no token yet."""
        for replica, seat in self.line._seats.items():
            waits = [one for one in seat.requests.values() if not one.began]
            assert (seat.slot.inflight, seat.slot.unproven) == (self.load(replica), len(waits))

    @invariant()
    def nobody_is_lost(self) -> None:
        """Each is in the line or on its replica."""
        assert set(self.line.waiters(self.now_s)) == self.waits
        for request, replica in self.on.items():
            found = self.line.whereabouts(request, self.now_s)
            assert found is not None
            assert found.replica == replica


TestLine = LineModel.TestCase
TestLine.settings = settings(max_examples=100, deadline=None)
