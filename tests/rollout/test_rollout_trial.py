"""A new set by its customers' requests: when it is bad, when it has been tried, and what comes of it."""

from __future__ import annotations

import pytest

from holdfast.rollout import machine as m
from holdfast.rollout.machine import DesiredState
from holdfast.rollout.trial import TRIAL_S, RequestCounts, SetTrial
from tests.rigs.worlds.rollout import Driver, World, part, revision

BAD, TRIED, WAITS = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("own", "others", "becomes"),
    [
        ((0, 0), (0, 0), TRIED),
        ((9, 9), (10, 0), TRIED),
        ((0, 0), (20, 0), WAITS),
        ((19, 0), (1, 0), WAITS),
        ((20, 0), (0, 0), TRIED),
        ((20, 1), (100, 0), WAITS),
        ((39, 1), (100, 0), WAITS),
        ((40, 1), (100, 0), TRIED),
        ((20, 4), (100, 0), WAITS),
        ((20, 5), (100, 0), BAD),
        ((40, 5), (0, 0), BAD),
        ((99, 5), (100, 0), BAD),
        ((100, 5), (100, 0), WAITS),
        ((120, 5), (100, 0), TRIED),
        ((50, 12), (200, 40), TRIED),
        ((50, 12), (200, 24), TRIED),
        ((50, 12), (200, 23), BAD),
    ],
)
def test_what_its_requests_say(own: tuple[int, int], others: tuple[int, int], becomes: tuple[bool, bool]) -> None:
    """Attempts and failures, its own and the others'. It is tried with so many that one more that failed would not be
    too many, or as well as the others are; bad with five of twenty or more that failed, if that is too many and more
    than twice the others' share; and where hardly anybody asks there is nothing to try it with."""
    trial = SetTrial.of({"b": RequestCounts(*own), "a": RequestCounts(*others)}, "b", 5)
    assert (trial.is_bad, trial.is_tried) == becomes


def tried_by(traffic: dict[str, RequestCounts], seconds: int = 10) -> Driver:
    """Revision 1 is in place, and two that serve are to become two others; one of those counts at 15 s."""
    driver = Driver(World())
    driver.desired = revision(1, worker=part("a*2"))
    list(driver.seconds(10))
    driver.world.traffic |= traffic
    driver.desired = revision(2, worker=part("b*2"))
    list(driver.seconds(seconds))
    return driver


def leavers(driver: Driver) -> list[str]:
    return [name for name, one in driver.state.replicas.items() if one.desired is not DesiredState.SERVE]


def test_who_has_not_listened_does_not_take_it_for_nobody_asking() -> None:
    """A supervisor that was killed is followed by one that knows of no traffic yet: it waits until it does."""
    driver = tried_by({"a": RequestCounts(200, 0)})
    assert leavers(driver) == []
    look = m.Observation(desired=driver.desired, replicas=driver.world.observe(driver.desired).replicas, traffic=None)
    assert m.step(driver.state, look, driver.now_s) == (driver.state, ())
    driver.world.traffic.clear()
    driver.step()
    assert leavers(driver) == ["worker-1"]


def test_a_trial_goes_on_after_a_clock_that_was_ahead() -> None:
    """No longer than a whole one."""
    driver = tried_by({"a": RequestCounts(200, 0)})
    restored = m.restore(m.decode(driver.written), 5.0)
    assert restored.trials == {"worker": 5.0 + TRIAL_S}


def test_a_breaker_that_opens_hides_nothing() -> None:
    """Control takes the traffic off the new one for the same failures, at the same moment: it is undone all the same,
    and nobody of the old set was missed."""
    driver = tried_by({"a": RequestCounts(200, 0)})
    driver.world.traffic["b"] = RequestCounts(40, 5)
    driver.world.bodies["worker-3"].weight = 0.0
    driver.step()
    why = "5 of 40 requests to the new worker failed (its rollout.errorPercentMax is 5)"
    assert (driver.state.undone, driver.state.why) == (2, why)
    assert leavers(driver) == ["worker-3"]


def test_a_breaker_that_opens_early_is_enough() -> None:
    """Three in a row failed before there were enough for a rate, and without traffic there never will be: it is undone
    at once. A breaker that opened for less, or where the others fail as much, says nothing."""
    driver = tried_by({"a": RequestCounts(200, 0), "b": RequestCounts(5, 2)})
    body = driver.world.bodies["worker-3"]
    body.weight, body.is_shut = 0.0, True
    driver.step()
    assert driver.state.undone == 0
    driver.world.traffic["b"] = RequestCounts(5, 3)
    driver.step()
    why = "3 of 5 requests to the new worker failed (its rollout.errorPercentMax is 5)"
    assert (driver.state.undone, driver.state.why) == (2, why)
    assert not SetTrial(RequestCounts(5, 3), RequestCounts(10, 5), 5, is_shut=True).is_bad
