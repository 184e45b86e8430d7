"""A deployment whose models come when they are asked for: what is wanted of it, and what is told of its requests."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from holdfast.discovery.keys import LEVELS, REPORTS
from holdfast.frontend.wanted_models import WantedModel, models_of
from holdfast.health.records import ReportRecord
from holdfast.routing.degradation import LevelRecord
from holdfast.store.contract import Put, Snapshot, Store
from holdfast.store.opening import open_store
from holdfast.testing.deployment import Deployment
from holdfast.wire.net import SocketNetwork
from tests.rigs.frontend.raw_http import Raw, Reply

STORE_S = 60.0
CHAT = "/v1/chat/completions"


def _in_store(deployment: Deployment, act: Callable[[Store], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        store = open_store(deployment.store, SocketNetwork(), random.Random(1))
        await store.start()
        try:
            return await act(store)
        finally:
            await store.close()

    return asyncio.run(run())


def up(deployment: Deployment) -> Deployment:
    """Return when its frontend answers: with no worker, nothing else has waited for that."""
    deployment.wait_until(lambda: deployment.health().get("status") == "no_worker", "the frontend")
    return deployment


def want(deployment: Deployment, *names: str) -> None:
    """Write that models are wanted; frontends have heard it when this returns."""

    async def put(store: Store) -> None:
        for name in names:
            await store.put(models_of("bench") + name, msgspec.json.encode(WantedModel(name)), STORE_S)

    _in_store(deployment, put)
    deployment.wait_until(lambda: set(names) <= set(listed(deployment)), "the models to be listed")


def want_no_more(deployment: Deployment, name: str) -> None:
    _in_store(deployment, lambda store: store.delete(models_of("bench") + name, STORE_S))


def tell_level(deployment: Deployment, record: LevelRecord) -> None:
    """As control does."""
    _in_store(deployment, lambda store: store.put(LEVELS + "bench", msgspec.json.encode(record), STORE_S))


def report(deployment: Deployment) -> ReportRecord:
    """What the frontend reports."""

    async def read(store: Store) -> ReportRecord:
        async with asyncio.timeout(STORE_S):
            async for event in store.watch(REPORTS):
                told = [event.value] if isinstance(event, Put) else []
                if isinstance(event, Snapshot):
                    told = list(event.items.values())
                if told:
                    return msgspec.json.decode(told[0], type=ReportRecord)
        raise AssertionError("there is no report")

    found: ReportRecord = _in_store(deployment, read)
    return found


def get(deployment: Deployment, path: str, headers: str = "") -> Reply:
    with Raw(deployment.port) as raw:
        return raw.get(path, headers).reply()


def shown_by(deployment: Deployment, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that asks the frontend, until that answers: a busy one may miss the second that a look waits."""
    done: list[subprocess.CompletedProcess[str]] = []

    def is_answered() -> bool:
        done[:] = [deployment.run(*words)]
        return "did not answer" not in done[0].stdout + done[0].stderr

    deployment.wait_until(is_answered, f"an answer to {words}")
    return done[0]


def listed(deployment: Deployment) -> list[str]:
    return [card["id"] for card in get(deployment, "/v1/models").json()["data"]]


def requests(deployment: Deployment, headers: str = "") -> list[dict[str, Any]]:
    """All that are under way."""
    found: list[dict[str, Any]] = get(deployment, "/v1/requests", headers).json()["data"]
    return found


def lines(deployment: Deployment) -> list[tuple[str, str, int | None]]:
    """Each request's name, state and place."""
    return [(row["request_id"], row["state"], row["place"]) for row in requests(deployment)]


def until_lines(deployment: Deployment, expected: list[tuple[str, str, int | None]]) -> None:
    deployment.wait_until(lambda: lines(deployment) == expected, f"{expected}")
