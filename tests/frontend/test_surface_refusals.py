"""A worker whose card cannot be admitted is told so, in its health and in the store."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from holdfast.core.address import parse_address
from holdfast.discovery.keys import CARDS, INSTANCES, REFUSALS, InstanceKey, InstanceRecord
from holdfast.store.client import EmbeddedStore
from holdfast.testing.deployment import Deployment
from holdfast.wire.net import SocketNetwork

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


async def test_the_reason_is_in_the_store_until_the_worker_is_gone() -> None:
    """The key under v1/refused/ names what is wrong with the card, and leaves with the worker's own keys."""
    with Deployment(workers=1) as deployment:
        store = EmbeddedStore(parse_address(deployment.store), SocketNetwork(), random.Random(1))
        await store.start()
        key = InstanceKey("bench-0123abcd", "worker", "generate", 0xBAD)
        record = InstanceRecord("unix:///nowhere.sock", "unix:///nowhere.beat", "0" * 16)
        mine = [
            store.register(CARDS + key.path, b'{"name": 3}'),
            store.register(INSTANCES + key.path, msgspec.json.encode(record)),
        ]
        try:
            async with asyncio.timeout(60):
                while (reason := await store.get(REFUSALS + key.path, 60)) is None:
                    await asyncio.sleep(0.02)
                assert b"name" in reason, reason
                for registration in mine:
                    await registration.withdraw()
                while await store.get(REFUSALS + key.path, 60) is not None:
                    await asyncio.sleep(0.02)
        finally:
            await store.close()
        deployment.wait_until(lambda: len(deployment.alive_workers()) == 1, "the good worker to serve on")
