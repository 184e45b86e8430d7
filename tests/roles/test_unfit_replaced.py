"""A manifest's only worker that control finds unfit, with real processes: it serves on until another does."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from holdfast.core.tasks import beside
from holdfast.discovery.keys import HEALTH
from holdfast.health.records import HealthRecord
from holdfast.store.mirror import Mirror
from tests.rigs.roles.kept_manifest import Kept

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long]
MANIFEST = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: healed}
spec:
  services:
    Frontend: {componentType: frontend}
    Planner:
      componentType: planner
      extraPodSpec: {mainContainer: {args: [--canary-interval-s, "1", --canary-share, "1"]}}
    Worker:
      componentType: worker
      replicas: 1
      modelName: holdfast-sim
      extraPodSpec: {mainContainer: {args: [--engine, sim, --sim-tpot-ms, "5", --allow-chaos]}}
"""
CLIENTS = 4


def verdicts(mirror: Mirror) -> dict[str, HealthRecord]:
    """Return control's verdicts, by the worker's name."""
    found = [msgspec.json.decode(value, type=HealthRecord) for key, value in mirror.values.items()]
    return {record.name: record for record in found}


async def test_the_only_worker_is_replaced_when_it_is_unfit_and_no_request_is_lost() -> None:
    """Its known questions come out wrong and its clients' answers right: control leaves it its traffic and asks for
    another, which is placed and serves before the first one leaves."""
    answers: list[str] = []

    async def ask(site: Kept) -> None:
        while True:
            answers.append((await asyncio.to_thread(site.stream("story", 40, model="holdfast-sim").answer)).wrong)

    with Kept() as site:
        async with site.kept(MANIFEST) as rolling:
            await site.in_place(rolling, 1)
            mirror = Mirror(site.store, [HEALTH])
            async with beside(mirror.run(), "verdicts"), asyncio.TaskGroup() as clients:
                asking = [clients.create_task(ask(site)) for _ in range(CLIENTS)]
                (first,) = site.workers()
                right_s = time.time()
                await site.until(
                    lambda: first in (found := verdicts(mirror)) and found[first].standing.right_s > right_s + 2.0,
                    "a few right canaries",
                )
                await asyncio.to_thread(site.chaos, first, "wrong_canaries")
                await site.until(lambda: verdicts(mirror)[first].replace, "the verdict")
                assert verdicts(mirror)[first].weight > 0.0
                verdict_s = time.monotonic()
                await site.until(lambda: len(site.workers()) == 2, "another to be placed")
                print(f"placed {time.monotonic() - verdict_s:.1f} s after the verdict")
                await site.until(lambda: "is being replaced" in str(rolling.status.report), "the status to say so")
                assert first in site.workers(), site.told
                (second,) = set(site.workers()) - {first}
                await site.until(lambda: site.workers() == [second], "the first one to leave")
                before = len(answers)
                await site.until(lambda: len(answers) >= before + 2 * CLIENTS, "answers of the second one")
                for task in asking:
                    task.cancel()
            assert set(answers) == {""}, [one for one in answers if one]
            assert any("is to be replaced" in line for line in site.told), site.told
