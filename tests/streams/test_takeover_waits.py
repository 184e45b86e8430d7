"""How long a stream waits for its standby, what that is decided by, and the order in which streams leave a worker."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Code
from holdfast.core.tiers import Tier
from holdfast.health.standing import HealthStatus
from holdfast.streams.dispatcher import STALLED_RETRY_S
from holdfast.streams.ledger import EMPTY_ATTEMPTS_MAX
from holdfast.streams.takeovers import (
    EXPECTED_S,
    OUTAGES_MAX,
    TAKEOVER_S_MAX,
    WAIT_S_MAX,
    WAIT_S_MIN,
    LeaderClaim,
    Prefills,
    Takeovers,
    standby_wait_s,
)
from tests.rigs.worlds.streams import Cluster

GROUP = ("d-00000000", "g")


def claim(epoch: int, group: str = "g") -> LeaderClaim:
    return LeaderClaim("d-00000000", group, epoch, worker=epoch)


@pytest.mark.parametrize(
    ("expected_s", "bound_s", "prefill_s", "wait_s"),
    [
        (0.05, 5.0, None, 5.0),  # the prefill was never measured: as long as a takeover may take
        (0.05, 5.0, 2.0, 2.0),  # no longer than the prefill elsewhere
        (0.05, 1.0, 40.0, 1.0),  # no longer than takeovers take here
        (0.05, 5.0, 0.04, 0.0),  # the prefill elsewhere is the quicker one
        (3.0, 5.0, 2.0, 0.0),
    ],
)
def test_a_stream_waits_while_its_standby_is_the_better_choice(
    expected_s: float, bound_s: float, prefill_s: float | None, wait_s: float
) -> None:
    """Bounded by both."""
    assert standby_wait_s(expected_s, bound_s, prefill_s) == wait_s


def test_prefills_are_estimated_by_texts_of_the_nearest_length() -> None:
    """In proportion; a short text says little of a long one where long ones were seen."""
    prefills = Prefills()
    assert prefills.estimate_s(100) is None
    prefills.add(10, 0.05)
    prefills.add(1000, 2.0)
    assert prefills.estimate_s(10) == pytest.approx(0.05)
    assert prefills.estimate_s(2000) == pytest.approx(4.0)
    assert prefills.estimate_s(500) == pytest.approx(1.0)
    for _ in range(100):
        prefills.add(1000, 4.0)
    assert prefills.estimate_s(1000) == pytest.approx(4.0, rel=0.01)


def test_takeovers_are_measured_between_a_floor_and_a_cap() -> None:
    """Before the first, the bound is the cap; a group that was started again after a long time is no takeover."""
    takeovers = Takeovers()
    assert (takeovers.expected_s, takeovers.bound_s) == (EXPECTED_S, WAIT_S_MAX)
    first = takeovers.leader_lost(claim(1), 10.0, lambda: 300)
    assert takeovers.leader_lost(claim(1), 10.5, lambda: 1) is first, "streams that leave together are one outage"
    takeovers.leader_found(GROUP, 10.02)
    assert (takeovers.expected_s, takeovers.bound_s) == (pytest.approx(0.02), WAIT_S_MIN)
    takeovers.leader_lost(claim(2), 20.0, lambda: 1)
    takeovers.leader_found(GROUP, 20.5)
    assert takeovers.bound_s == pytest.approx(2.0)
    takeovers.leader_lost(claim(3), 30.0, lambda: 1)
    takeovers.leader_found(GROUP, 30.0 + TAKEOVER_S_MAX + 1)
    takeovers.leader_found(GROUP, 200.0)
    assert takeovers.bound_s == pytest.approx(2.0)
    takeovers.leader_lost(claim(4), 300.0, lambda: 1)
    takeovers.leader_found(GROUP, 309.0)
    assert takeovers.bound_s == WAIT_S_MAX


def test_outages_that_never_end_are_bounded() -> None:
    """The one that began first is forgotten first."""
    takeovers = Takeovers()
    for number in range(OUTAGES_MAX + 1):
        takeovers.leader_lost(claim(1, f"g{number}"), float(number), lambda: 1)
    takeovers.leader_found(("d-00000000", "g0"), 5.0)
    assert takeovers.expected_s == EXPECTED_S
    takeovers.leader_found(("d-00000000", "g1"), 5.0)
    assert takeovers.expected_s == 4.0


@pytest.mark.parametrize("end", ["die", "drain", "judged_lost"])
def test_streams_of_a_lost_worker_leave_by_tier_and_then_by_age(end: str) -> None:
    """Whatever takes their worker from them, and though one of them was sent there later than a younger one."""
    cluster = Cluster()
    first = cluster.worker("first")
    cluster.ask("old")
    cluster.ask("standard")
    lost = cluster.worker("lost")
    first.route(routable=False)
    cluster.ask("low", tier=Tier.BEST_EFFORT)
    cluster.ask("high", tier=Tier.PREMIUM)
    cluster.ask("young")
    first.drain()  # `old` and `standard` come to `lost` after the others
    assert {"old", "standard", "low", "high", "young"} <= lost.numbers.keys()
    other = cluster.worker("other")
    getattr(lost, end)()
    assert [request.request_id for request in other.requests] == ["high", "old", "standard", "young", "low"]


@pytest.mark.parametrize("news", ["its connection ends", "control says that its process ended"])
def test_streams_wait_for_their_standby_whichever_news_comes_first(news: str) -> None:
    """Control sees an engine die too, and its word may reach the frontend before the connection's end does."""
    cluster = Cluster()
    active = cluster.worker("a", group="g", epoch=1)
    standby = cluster.worker("b", group="g", active=False)
    cluster.ask("s")
    cluster.wait(2.0)  # its prefill takes long, so that it waits for the standby
    active.say("s", [1])
    other = cluster.worker("c")
    if news == "its connection ends":
        active.die()
    else:
        active.judged(HealthStatus.DEAD, fall=1, why="its process ended")
        active.die()
    assert not other.requests
    standby.take_over(2)
    assert [request.request_id for request in standby.requests] == ["s"]


@pytest.mark.parametrize("others", ["get tokens", "get none"])
def test_an_engine_that_answers_nobody_costs_no_stream_while_a_standby_is_there(others: str) -> None:
    """A request that fails again and again is given up, but not on an engine that has made no token for any other
    stream since: its standby answers it."""
    cluster = Cluster()
    active = cluster.worker("a", group="g", epoch=1)
    standby = cluster.worker("b", group="g", active=False)
    client, other = cluster.ask("s"), cluster.ask("other")
    active.say("other", [1])
    for _ in range(1, EMPTY_ATTEMPTS_MAX):
        active.say("s", [], "stop")
        cluster.wait(5.0)  # the worker is set aside for a while
        assert client.flight.slot is not None
    if others == "get tokens":
        active.say("other", [2])
    active.say("s", [], "stop")
    if others == "get tokens":
        assert client.failure is not None
        assert client.failure[0] is Code.EMPTY_ANSWER
        return
    assert client.failure is None
    cluster.wait(2 * STALLED_RETRY_S)
    assert "s" in active.numbers, "it tries the engine again meanwhile"
    active.say("s", [], "stop")
    standby.take_over(2)
    standby.say("s", [7, 0], "stop")
    assert (client.finish, client.shown) == ("stop", [7, 0])
    assert other.failure is None
