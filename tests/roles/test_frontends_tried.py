"""A frontend change that refuses customers' requests, with real processes: it is undone, and no old frontend leaves."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json

import pytest

from holdfast.rollout.machine import RolloutPhase
from tests.rigs.roles.kept_manifest import WAIT_S, Kept

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(300)]
MANIFEST = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: tried}
spec:
  services:
    Frontend:
      componentType: frontend
      extraPodSpec: {mainContainer: {args: ARGS}}
    Worker:
      componentType: worker
      modelName: holdfast-sim
      extraPodSpec: {mainContainer: {args: [--engine, sim, --sim-tpot-ms, "5"]}}
"""
GOOD, BAD = MANIFEST.replace("ARGS", "[]"), MANIFEST.replace("ARGS", '[--body-bytes-max, "1"]')
BODY = json.dumps({"model": "holdfast-sim", "prompt": "a story", "max_tokens": 2})
PAUSE_S = 0.05  # between two requests: enough of them within a minute, with little to do


class Customer:
    """A client that opens a connection for each request, so that every frontend gets its share."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.statuses: list[int] = []

    def ask(self) -> int:
        """The answer's status; 0: there was none."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        return 0

    async def ask_on(self) -> None:
        while True:
            self.statuses.append(await asyncio.to_thread(self.ask))
            await asyncio.sleep(PAUSE_S)


async def test_a_frontend_that_refuses_requests_is_undone() -> None:
    """Some requests find it and are refused, a few dozen at most; the old frontend is the same process all the while,
    and all requests are answered after that."""
    with Kept() as site:
        async with site.kept(GOOD) as rolling:
            await site.in_place(rolling, 1)
            (old,) = [slot.life.pid for slot in site.supervisor.slots.values() if slot.job.role == "frontend"]
            customer = Customer(site.port)
            asking = asyncio.create_task(customer.ask_on())
            try:
                await site.until(lambda: len(customer.statuses) > 20, "traffic")
                assert set(customer.statuses) == {200}
                await site.apply(rolling, BAD)
                await site.until(
                    lambda: rolling.state.desired_number == 2 and rolling.state.phase is RolloutPhase.STEADY, "an end"
                )
                assert rolling.state.undone == 2, (site.told, customer.statuses)
                assert "requests to the new Frontend failed" in rolling.state.why
                assert 413 in customer.statuses
                seen = len(customer.statuses)
                await site.until(lambda: len(customer.statuses) > seen + 20, "more traffic")
                assert set(customer.statuses[seen + 1 :]) == {200}
            finally:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
            pids = [slot.life.pid for slot in site.supervisor.slots.values() if slot.job.role == "frontend"]
            assert pids == [old]
