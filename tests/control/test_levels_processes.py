"""Levels and spares with real processes: what control writes when workers are lost and come back."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import uvloop

from holdfast.health.standing import HealthStatus
from holdfast.testing.deployment import Deployment
from holdfast.testing.waiting import in_thread, until
from holdfast.testing.workload import Asking, Workload
from tests.rigs.health.verdicts import Verdicts, watched

pytestmark = [pytest.mark.alone, pytest.mark.processes]

BOUND_S = 60.0
TIMES = {"fall_s": 0.5, "fall_near_s": 1.5, "return_s": 0.5, "return_near_s": 1.5, "hold_s": 2.0}
PATIENT = TIMES | {"fall_s": 20.0, "fall_near_s": 20.0}  # no level falls for a pause of the machine's
HEALTH_OFTEN = {"canary_interval_s": 2.0, "canary_share": 1.0}


def deployed(workers: int, times: dict[str, float], **reserve: Any) -> Deployment:
    """Workers that promise something, so that each is a share of it: idle, they count as planned."""
    levels = {"slo": {"requests_per_s": 100.0, "workers": workers}, "times": times, "reserve": reserve}
    return Deployment(workers, {"tpot_ms": 20.0}, control={"health": HEALTH_OFTEN, "levels": levels})


@pytest.mark.long
def test_the_level_follows_workers_that_are_lost_outlives_control_and_returns() -> None:
    """Two of four are stopped: level 2. Control is killed, and the next goes on from there. None is left: level 4 when
    the hold has run out. All go on: level 0 again, and nothing is left of it."""
    with deployed(4, TIMES) as deployment:
        uvloop.run(_levels(deployment))


async def _levels(deployment: Deployment) -> None:
    async with watched(deployment) as rig:
        written = rig.verdicts
        await until(lambda: len(written.living) == 4 and _sound(written), "every worker's first check", BOUND_S)
        assert level(written) == 0
        for name in deployment.worker_names[:2]:
            deployment.signal(name, signal.SIGSTOP)
        await until(lambda: level(written) == 2, "level 2", BOUND_S)
        await in_thread(deployment.kill, "control")
        before = len(written.levels)
        deployment.start_control("control-2")
        for name in deployment.worker_names[2:]:
            deployment.signal(name, signal.SIGSTOP)
        await until(lambda: written.levels[-1].vacant, "level 4 for want of any worker", BOUND_S)
        assert [record.level for record in written.levels[before:]] == [4]
        for name in deployment.worker_names:
            deployment.signal(name, signal.SIGCONT)
        await until(lambda: level(written) == 0 and _sound(written), "level 0", BOUND_S)
        assert written.levels[-1].planned == 4


def level(written: Verdicts) -> int:
    return written.levels[-1].level if written.levels else -1


def _sound(written: Verdicts) -> bool:
    return all(record.standing.status == HealthStatus.HEALTHY for record in written.living.values())


def test_a_spare_has_no_work_until_a_worker_is_lost_and_serves_in_that_moment() -> None:
    """One of four is kept in reserve. Under load it makes nothing; another is stopped, and with that verdict the spare
    is none any more and makes tokens; no stream is lost and the level stays 0."""
    with deployed(4, PATIENT, spares="1", settle_s=3600.0) as deployment:
        uvloop.run(_spare(deployment))


async def _spare(deployment: Deployment) -> None:
    async with watched(deployment) as rig:
        written = rig.verdicts
        [spare] = await until(lambda: written.spares, "a spare", BOUND_S)
        await until(lambda: _weights(deployment).get(spare) == 0.0, "the frontend to know it", BOUND_S)
        asking = Asking(deployment.port, Workload(8, 40, seed=3))
        async with asking.all_the_time():
            await until(lambda: len(asking.received) >= 16, "answers", BOUND_S)
            facts = await in_thread(deployment.worker_facts, spare)
            assert facts["streams"] == 0
            lost = next(name for name in deployment.worker_names if name != spare)
            deployment.signal(lost, signal.SIGSTOP)
            await until(lambda: not written.spares, "the spare to serve", BOUND_S)
            fell, serves = written.living[lost], written.living[spare]
            assert fell.standing.weight == 0.0
            assert serves.at_unix_s >= fell.standing.since_s
            await until(lambda: _streams(deployment, spare), "streams on it", BOUND_S, every_s=0.1)
            deployment.signal(lost, signal.SIGCONT)
        assert [received.status for _, received in asking.received] == [200] * len(asking.received)
        assert {record.level for record in written.levels} == {0}


def _weights(deployment: Deployment) -> dict[str, float]:
    return {worker["name"]: worker["weight"] for worker in deployment.health().get("workers", [])}


def _streams(deployment: Deployment, name: str) -> int:
    return int(deployment.worker_facts(name)["streams"])
