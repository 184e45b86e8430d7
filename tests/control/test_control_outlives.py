"""Control killed, doubled, and cut off from its store, with real processes: every verdict stands, none is acted on
twice, nobody is revived by forgetting, and serving goes on."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from holdfast.health.standing import HealthStatus
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import get_json
from holdfast.testing.waiting import in_thread, until
from tests.rigs.health.verdicts import Verdict, WatchedDeployment, watched

pytestmark = [pytest.mark.processes, pytest.mark.alone]

# Checks follow each other at once, so that a test sees many.
HEALTH = {"canary_interval_s": 0.3, "canary_share": 1.0}
SIM = {"ttft_ms": 5, "tpot_ms": 2}
BOUND_S = 60.0
AWAY_S = 20.0  # for how long the store is


@contextlib.asynccontextmanager
async def running(workers: int = 3) -> AsyncIterator[WatchedDeployment]:
    """Workers that control thinks well of."""
    with Deployment(workers, SIM, control={"health": HEALTH}) as place:
        async with watched(place) as rig:
            await until(lambda: not rig.unsound(), "every worker to be found sound", BOUND_S)
            yield rig


def page(rig: WatchedDeployment, name: str = "control") -> dict[str, Any]:
    status = rig.deployment.record(name).get("status", "")
    return get_json(status, "/health", BOUND_S) if status else {}


async def leads(rig: WatchedDeployment, name: str = "control") -> None:
    def does() -> bool:
        with contextlib.suppress(OSError):
            return bool(page(rig, name).get("leads"))
        return False

    await until(lambda: in_thread(does), f"{name} to lead", BOUND_S)


async def checked_since(rig: WatchedDeployment, names: Iterable[str], since_unix_s: float) -> None:
    """Each of them passed a check that was sent after that."""

    def all_were() -> bool:
        found = [rig.verdict(name) for name in names]
        return all(one is not None and one.record.standing.good_s > since_unix_s for one in found)

    await until(all_were, f"a check of {names} after control's return", BOUND_S)


async def falls(rig: WatchedDeployment, name: str) -> Verdict:
    def fell() -> Verdict | None:
        found = rig.verdict(name)
        return found if found is not None and found.record.standing.fall else None

    return await until(fell, f"{name} to fall", BOUND_S)  # type: ignore[no-any-return]


def hold(history: list[Verdict]) -> None:
    """What must be true of all verdicts that were ever written: of one worker falls come one after the other, and who
    is quarantined stays so for as long as it has the same weights."""
    last: dict[str, Verdict] = {}
    for verdict in history:
        before = last.get(verdict.path)
        if before is not None:
            was, now = before.record, verdict.record
            assert now.standing.fall in (was.standing.fall, was.standing.fall + 1), (was, now)
            if was.standing.quarantined and was.load == now.load:
                assert now.standing.quarantined, (was, now)
                assert now.weight == 0, (was, now)
        last[verdict.path] = verdict


def never_fell(history: list[Verdict], names: Iterable[str]) -> None:
    wrong = [
        one for one in history if one.name in names and (one.record.standing.fall or one.status is HealthStatus.DEAD)
    ]
    assert not wrong, wrong[0]


async def answers(rig: WatchedDeployment) -> None:
    """A client is answered whole."""
    stream = await in_thread(lambda: rig.deployment.stream("hello", 20))
    answer = await in_thread(stream.answer)
    assert (answer.finish, answer.error) == ("length", None)


async def test_a_killed_control_goes_on_from_what_is_written() -> None:
    """SIGKILL after a wrong answer was found: without control clients are answered; the next one keeps the verdict
    though the worker answers rightly now, moves nothing again, and judges the others as before."""
    async with running() as rig:
        place = rig.deployment
        bad, *good = place.worker_names
        await in_thread(lambda: place.chaos(bad, "wrong_tokens"))
        before = await falls(rig, bad)
        assert before.record.standing.quarantined
        place.kill("control")
        await in_thread(lambda: place.chaos(bad, "clear"))
        await answers(rig)
        began_s = time.time()
        place.start_control()
        await leads(rig)
        await checked_since(rig, good, began_s)
        hold(rig.verdicts.history)
        never_fell(rig.verdicts.history, good)
        after = rig.verdicts.now[before.path].record
        assert after.standing.fall == 1
        assert after.standing.quarantined or after.load > before.record.load


@pytest.mark.long
async def test_one_of_two_leads_and_the_other_goes_on() -> None:
    """Two at once: one leads, the other shows the same verdicts and writes none; killed, it is followed by the other,
    and nothing is done twice."""
    async with running() as rig:
        place = rig.deployment
        stopped, *well = place.worker_names
        place.start_control("control-2")
        await until(lambda: place.record("control-2"), "the second control", BOUND_S)
        place.signal(stopped, signal.SIGSTOP)
        first = await falls(rig, stopped)
        shown = await in_thread(page, rig, "control-2")
        assert shown["leads"] is False
        assert {one["name"] for one in shown["verdicts"]} == set(place.worker_names)
        assert {one.record.by.partition("/")[0] for one in rig.verdicts.history} == {"control"}
        began_s = time.time()
        place.kill("control")
        await leads(rig, "control-2")
        await checked_since(rig, well, began_s)
        place.start_control()
        await until(lambda: in_thread(lambda: page(rig).get("leads") is False), "the first control to follow", BOUND_S)
        hold(rig.verdicts.history)
        never_fell(rig.verdicts.history, well)
        assert rig.verdicts.now[first.path].record.standing.fall == 1
        writers = [one.record.by.partition("/")[0] for one in rig.verdicts.history]
        assert writers == sorted(writers), "one wrote after the other, never both"
        place.signal(stopped, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_store_that_is_away(how: str) -> None:
    """20 s without a store: clients are answered; a worker that falls meanwhile is written down once it is back, once;
    of the others nobody is taken for dead, and control, killed meanwhile or not, forgets nothing."""
    async with running() as rig:
        place = rig.deployment
        stopped, *well = place.worker_names
        if how == "killed":
            place.kill("store")
        else:
            place.signal("store", signal.SIGSTOP)
        back_s = time.monotonic() + AWAY_S
        place.signal(stopped, signal.SIGSTOP)
        await answers(rig)
        unsaid = lambda: "cannot write down" in place.log("control")  # noqa: E731
        await until(lambda: in_thread(unsaid), "control to say that it cannot write", BOUND_S)
        assert not any(one.record.standing.fall for one in rig.verdicts.history)
        await until(lambda: time.monotonic() > back_s, "the store's return", AWAY_S + 1.0)
        await answers(rig)
        if how == "killed":
            place.start_store()
        else:
            place.signal("store", signal.SIGCONT)
        began_s = time.time()
        await until(lambda: _falls_of(rig, stopped) == [0, 1], "the fall to be written down", BOUND_S)
        await checked_since(rig, well, began_s)
        hold(rig.verdicts.history)
        never_fell(rig.verdicts.history, well)
        place.signal(stopped, signal.SIGCONT)


def _falls_of(rig: WatchedDeployment, name: str) -> list[int]:
    seen = [one.record.standing.fall for one in rig.verdicts.history if one.name == name]
    return sorted(set(seen))


async def test_nothing_that_hangs_keeps_control() -> None:
    """With its store and a worker stopped it is ready, shows itself, and leaves when it is asked to."""
    async with running(2) as rig:
        place = rig.deployment
        place.kill("control")
        place.signal("store", signal.SIGSTOP)
        place.signal(place.worker_names[0], signal.SIGSTOP)
        place.start_control()
        await until(lambda: in_thread(_status, rig), "control's page", BOUND_S)
        assert (await in_thread(page, rig))["leads"] is False
        place.signal("control", signal.SIGTERM)
        assert await in_thread(lambda: place.processes["control"].wait(BOUND_S)) == 0
        place.signal("store", signal.SIGCONT)
        place.signal(place.worker_names[0], signal.SIGCONT)


def _status(rig: WatchedDeployment) -> str:
    record = rig.deployment.record("control")
    return str(record.get("status", "")) if record.get("pid") == rig.deployment.pid("control") else ""
