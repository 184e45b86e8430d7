"""Two deployments on one machine and in one store, whose components have the same names and one of whose own names
begins with the other's: no answer of one is the other's, and the end of one is nothing to the other."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.apart.twins import LONG, SHORT, WAIT_S, Twin, Words, alone, answer, manifest, one_store
from holdfast.discovery.keys import deployment_of
from holdfast.rollout.records import change_desired, deleted
from holdfast.store.contract import Snapshot, Store
from holdfast.store.opening import open_store
from holdfast.testing.clients import open_client
from holdfast.testing.rig import DeploymentRig, get_json
from holdfast.testing.waiting import in_thread
from holdfast.wire.net import SocketNetwork

CLIENTS = 16  # of each deployment, at once


@dataclass
class Tally:
    """Counts what clients of both deployments saw."""

    right: Words
    answers: int = 0
    wrong: list[str] = field(default_factory=list)

    def take(self, name: str, asked: tuple[str, int], got: list[int]) -> None:
        self.answers += 1
        if got != self.right[asked]:
            self.wrong.append(f"{name}: {asked} {got}")


async def ask_on(twin: Twin, tally: Tally, share: Callable[[], bool], number: int) -> None:
    """One client: all prompts of all models, from some place on, while there is something left to ask."""
    client = await open_client(twin.rig.port)
    asked = list(tally.right)
    try:
        while share():
            number += 7
            one = asked[number % len(asked)]
            tally.take(twin.name, one, await answer(client, *one))
    finally:
        client.close()


class Counted:
    """Allows so many requests, and then no more."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        self.left -= 1
        return self.left >= 0


async def keys_of(store: Store, name: str) -> list[str]:
    """All keys that speak of one deployment: their third part is its name, or the namespace of one of its sets."""
    async with contextlib.aclosing(store.watch("v1/")) as events:
        async for event in events:
            if isinstance(event, Snapshot):
                parts = {key: key.split("/")[2] for key in event.items}
                return [key for key, part in parts.items() if name in (part, deployment_of(part))]
    raise AssertionError("the watch ended")


async def prove(requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Both alone, both together under `requests`, and then the one with the shorter name deleted under more."""
    right: dict[str, Words] = {}
    for name in (SHORT, LONG):
        tell(f"{name} alone")
        right[name] = await alone(name)
    with contextlib.ExitStack() as rigs:
        short, long, middle = Twin(SHORT, manifest(SHORT)), Twin(LONG, manifest(LONG)), DeploymentRig()
        for rig in (short.rig, long.rig, middle):
            rigs.callback(rig.close)
        async with one_store(middle) as url:
            return await _together(short, long, url, right, requests, tell)


async def _together(
    short: Twin, long: Twin, url: str, right: dict[str, Words], requests: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    store = open_store(url, SocketNetwork(), random.Random(1))
    await store.start()
    try:
        async with long.kept(url), short.kept(url) as gone:
            tallies = {twin.name: Tally(right[twin.name]) for twin in (short, long)}
            tell(f"{requests} requests")
            began_s = time.monotonic()
            await _load((short, long), tallies, requests)
            took_s = time.monotonic() - began_s
            strangers = {name for twin in (short, long) for name in twin.seen() if not _is_of(name, twin.name)}
            refused = await _other_names(short, long)
            before, keys = long.processes(), await keys_of(store, LONG)
            tell(f"{SHORT} is deleted")
            after = Tally(right[LONG])
            while_gone = asyncio.create_task(_load_until(long, after, gone))
            await change_desired(store, SHORT, deleted(SHORT, time.time()))
            await asyncio.wait([gone], timeout=WAIT_S)
            await while_gone
            left = await keys_of(store, SHORT)
            unchanged = long.processes() == before and set(keys) <= set(await keys_of(store, LONG))
    finally:
        await store.close()
    blind = [one for one in right[SHORT] if one in right[LONG] and right[SHORT][one] == right[LONG][one]]
    wrong = [one for tally in (*tallies.values(), after) for one in tally.wrong]
    asked = sum(tally.answers for tally in tallies.values())
    row: dict[str, Any] = {"requests": asked, "requests_per_s": round(asked / took_s)}
    row |= {"wrong": len(wrong), "first_wrong": wrong[:3], "blind_prompts": len(blind), "strangers": sorted(strangers)}
    row |= {"refused_by_name": refused, "requests_meanwhile": after.answers, "other_unchanged": unchanged}
    return row | {"deleted": gone.done(), "keys_left": sorted({"/".join(key.split("/")[:2]) for key in left})}


def _is_of(worker: str, name: str) -> bool:
    """Names have the deployment's, the service's, the set's and a number."""
    return worker.rsplit("-", 3)[0] == name


async def _load(twins: tuple[Twin, ...], tallies: dict[str, Tally], requests: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for twin in twins:
            share = Counted(requests // len(twins))
            for number in range(CLIENTS):
                tasks.create_task(ask_on(twin, tallies[twin.name], share, number * 13))


async def _load_until(twin: Twin, tally: Tally, over: asyncio.Task[None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(ask_on(twin, tally, lambda: not over.done(), number * 13))


async def _other_names(short: Twin, long: Twin) -> bool:
    """Whether each refuses the other's own model, and lists its own alone."""
    for twin, other in ((short, long), (long, short)):
        client = await open_client(twin.rig.port)
        got = await answer(client, other.models[0], 1)
        client.close()
        listed = await in_thread(get_json, f"127.0.0.1:{twin.rig.port}", "/v1/models")
        if got != [-404] or Counter(one["id"] for one in listed["data"]) != Counter(twin.models):
            return False
    return True


def run(requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return a row of a proof."""
    row = asyncio.run(prove(requests, tell))
    met = row["requests"] >= requests and not (row["wrong"] or row["blind_prompts"] or row["strangers"])
    met = met and row["refused_by_name"] and row["deleted"] and row["other_unchanged"] and row["requests_meanwhile"] > 0
    bound = f"{requests} requests, each answered by its own set; the end of one deployment is nothing to the other"
    return row | {"bound": bound, "met": bool(met)}
