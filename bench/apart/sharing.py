"""Two deployments of workers behind the frontend of a third, which shares them: every answer is of the right one, and
each is rolled out by itself, while the other serves on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

from bench.apart.twins import LONG, PROMPTS, SAME, SHORT, WAIT_S, Twin, Words, alone, answer, door, manifest, one_store
from holdfast.rollout.machine import RolloutPhase
from holdfast.rollout.records import AskedManifest, applied, change_desired
from holdfast.spec.manifest.checking import check
from holdfast.store.opening import open_store
from holdfast.testing.clients import open_client
from holdfast.testing.rig import DeploymentRig
from holdfast.testing.waiting import until
from holdfast.wire.net import SocketNetwork

CLIENTS = 8
DOOR = "twi"  # a beginning of both others' names


async def prove(requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """`requests` through the shared frontend; then one of the two is replaced, under more."""
    right = {}
    for name in (SHORT, LONG):
        tell(f"{name} alone")
        right[name] = await alone(name)
    with contextlib.ExitStack() as rigs:
        shared = Twin(DOOR, door(DOOR, SHORT, LONG))
        behind = [Twin(name, manifest(name, frontend=False)) for name in (SHORT, LONG)]
        middle = DeploymentRig()
        for rig in (shared.rig, middle, *(twin.rig for twin in behind)):
            rigs.callback(rig.close)
        async with one_store(middle) as url, shared.kept(url), behind[0].kept(url), behind[1].kept(url):
            wrong: list[str] = []
            each = requests // CLIENTS
            tell(f"{requests} requests")
            await asyncio.gather(*(_ask(shared, right, each, number, wrong) for number in range(CLIENTS)))
            before = behind[1].processes()
            tell(f"{SHORT} is replaced")
            asking = [asyncio.create_task(_ask(shared, right, each, number, wrong)) for number in range(CLIENTS)]
            took_s = await _replace(behind[0], url)
            await asyncio.gather(*asking)
            untouched = behind[1].processes() == before
    row = {"requests": 2 * requests, "wrong": len(wrong), "first_wrong": wrong[:3], "rollout_s": round(took_s, 1)}
    return row | {"other_unchanged": untouched}


async def _ask(shared: Twin, right: dict[str, Words], count: int, number: int, wrong: list[str]) -> None:
    """Each deployment's own model, and the name that both have, which either may answer, each with its own words."""
    client = await open_client(shared.rig.port)
    try:
        for turn in range(count):
            prompt, name = (number * 5 + turn) % PROMPTS, (SHORT, LONG)[turn % 2]
            got = await answer(client, f"of-{name}", prompt)
            if got != right[name][f"of-{name}", prompt]:
                wrong.append(f"of-{name} {prompt}: {got}")
            got = await answer(client, SAME, prompt)
            if got not in (right[SHORT][SAME, prompt], right[LONG][SAME, prompt]):
                wrong.append(f"{SAME} {prompt}: {got}")
    finally:
        client.close()


async def _replace(twin: Twin, url: str) -> float:
    """Its workers by others that say the same; seconds until all of them are in place."""
    text = twin.manifest.replace('--sim-ttft-ms, "0"', '--sim-ttft-ms, "1"')
    read = check(text.encode()).manifest
    assert read is not None
    began_s = time.monotonic()
    store = open_store(url, SocketNetwork(), random.Random(1))
    await store.start()
    try:
        await change_desired(store, twin.name, applied(AskedManifest.of(text, read), time.time()))
    finally:
        await store.close()
    await until(lambda: _is_second(twin), f"the second revision of {twin.name}", WAIT_S)
    return time.monotonic() - began_s


def _is_second(twin: Twin) -> bool:
    memory = twin.rolled.rolling.state if twin.rolled is not None and twin.rolled.rolling is not None else None
    return memory is not None and memory.phase is RolloutPhase.STEADY and memory.target.number == 2


def run(requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return a row of a proof."""
    row = asyncio.run(prove(requests, tell))
    bound = "each answer of the deployment that was asked for; one is rolled out by itself behind a frontend of another"
    return row | {"bound": bound, "met": not row["wrong"] and row["other_unchanged"]}
