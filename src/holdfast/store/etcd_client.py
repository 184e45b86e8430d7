"""A client of etcd, through its JSON gateway.

Always true: a heart asks etcd a cheap question every second, and what it finds is the client's state: no answer for 3 s
(a frozen etcd keeps its connections open) or refused connections are an outage, told once. When the outage is over, or
the answers come from another endpoint or another history, every watch starts anew with a snapshot. A watch whose
stream merely breaks goes on from the revision after the last one it saw.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from holdfast.core.tasks import Tasks, set_within
from holdfast.store.backoff import Backoff
from holdfast.store.contract import (
    State,
    check_key,
    check_value,
)
from holdfast.store.etcd_gateway import (
    Answer,
    Empty,
    EtcdError,
    EtcdGateway,
    EtcdUnreachable,
    PutRequest,
    RangeRequest,
    RangeResponse,
    TxnResponse,
)
from holdfast.store.etcd_lease import LeaseKeeper
from holdfast.store.etcd_watch import WatchTasks
from holdfast.store.shared import QUEUE_EVENTS_MAX, LeasedKey, WatchHub, WatchQueue

_log = logging.getLogger(__name__)

HEART_INTERVAL_S = 1.0
HEART_TIMEOUT_S = 3.0
# One broken connection may be an old one of the pool; two failures in a row are an outage.
REFUSALS_LOST = 2


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """`lease_ttl_s`: how long etcd keeps the keys of a client that has died (s)."""

    lease_ttl_s: int = 10
    queue_events_max: int = QUEUE_EVENTS_MAX


DEFAULT_SETTINGS = EtcdSettings()


class EtcdStore:
    """`Store` over etcd; `endpoints` are host:port."""

    def __init__(
        self, endpoints: tuple[str, ...], rng: random.Random, settings: EtcdSettings = DEFAULT_SETTINGS
    ) -> None:
        self._address = "etcd://" + ",".join(endpoints)
        self._gateway = EtcdGateway(endpoints, rng)
        self._keeper = LeaseKeeper(self._gateway, settings.lease_ttl_s, Backoff(rng))
        self._watches = WatchTasks(self._gateway, rng, self._look_now)
        self._hub = WatchHub(
            self._address,
            "check that etcd runs at this address and has a leader",
            on_refetch=self._restart_watch,
            on_close=self._watches.stop,
            events_max=settings.queue_events_max,
        )
        self._backoff = Backoff(rng)
        self._group: asyncio.TaskGroup | None = None
        self._beat_now = asyncio.Event()
        self._generation = 0
        self._revision = 0
        self._tasks = Tasks(f"store {self._address}")
        self._closed = False

    @property
    def state(self) -> State:
        return self._hub.state

    def __repr__(self) -> str:
        return self._hub.status(self._keeper.wishes.values(), closed=self._closed)

    async def start(self) -> None:
        assert not len(self._tasks), "started twice"
        await self._gateway.__aenter__()
        self._tasks.spawn(self._run(), "run")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._hub.close()
        if len(self._tasks):
            await self._tasks.stop()
            await self._keeper.revoke()
            await self._gateway.__aexit__(None, None, None)

    def register(self, key: str, value: bytes) -> LeasedKey:
        return self._keeper.register(key, value)

    async def get(self, key: str, timeout_s: float) -> bytes | None:
        check_key(key)
        answer = await self._call("kv/range", RangeRequest(key.encode()), RangeResponse, f"get {key}", timeout_s)
        return answer.kvs[0].value if answer.kvs else None

    async def put(self, key: str, value: bytes, timeout_s: float) -> None:
        check_key(key)
        check_value(value)
        await self._call("kv/put", PutRequest(key.encode(), value), Empty, f"put {key}", timeout_s)

    async def swap(self, key: str, value: bytes | None, expected: bytes | None, timeout_s: float) -> bool:
        check_key(key)
        check_value(value or b"")
        name, what = key.encode(), f"swap {key}"
        held = {"target": "VALUE", "value": expected} if expected is not None else {"target": "CREATE"}
        does = {"request_delete_range": {"key": name}} if value is None else {"request_put": PutRequest(name, value)}
        request = {
            "compare": [{"key": name, "result": "EQUAL", **held}],
            "success": [does],
            "failure": [{"request_range": RangeRequest(name)}],
        }
        answer = await self._call("kv/txn", request, TxnResponse, what, timeout_s)
        there = [one.value for response in answer.responses for one in response.response_range.kvs]
        return answer.succeeded or there == ([] if value is None else [value])

    async def delete(self, key: str, timeout_s: float) -> None:
        check_key(key)
        await self._call("kv/deleterange", {"key": key.encode()}, Empty, f"delete {key}", timeout_s)

    def watch(self, prefix: str) -> WatchQueue:
        queue = self._hub.add(prefix)
        self._restart_watch(queue)
        return queue

    # Calls

    async def _call(self, path: str, request: object, kind: type[Answer], what: str, timeout_s: float) -> Answer:
        """Ask under this client's bounds, and translate what goes wrong."""
        async with self._hub.call(what, timeout_s):
            try:
                return await self._gateway.ask(path, request, kind, timeout_s)
            except EtcdError as error:
                raise self._hub.unavailable(f"{what} failed: {error}") from error

    # The heart

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as self._group:
                    self._group.create_task(self._keeper.run())
                    self._group.create_task(self._heart())
            except Exception as error:
                _log.exception("%r: starting over", self)
                self._hub.become_lost(f"internal error: {error!r}")
            finally:
                self._group = None
            await asyncio.sleep(HEART_INTERVAL_S)

    async def _heart(self) -> None:
        """Ask, judge, rest; for ever."""
        failures = 0
        while True:
            self._beat_now.clear()
            failures = 0 if await self._beat(failures) else failures + 1
            rest_s = self._backoff.next_s() if failures else HEART_INTERVAL_S
            await set_within(self._beat_now, rest_s)

    async def _beat(self, failures: int) -> bool:
        """One question; False if it was not answered."""
        loop = asyncio.get_running_loop()
        asked_at_s = loop.time()
        request = RangeRequest(b"\0", limit=1, count_only=True)
        try:
            answer = await self._gateway.call("kv/range", request, RangeResponse, HEART_TIMEOUT_S)
        except (EtcdUnreachable, EtcdError) as error:
            took_s = loop.time() - asked_at_s
            refused = took_s < HEART_TIMEOUT_S / 2
            # Much longer than our own timeout: it was we who were stopped, so this says nothing about etcd.
            if took_s < HEART_TIMEOUT_S + 1 and (not refused or failures + 1 >= REFUSALS_LOST):
                self._hub.become_lost(str(error))
            return False
        self._judge(answer.header.revision)
        return True

    def _judge(self, revision: int) -> None:
        """etcd answers: is it the one we knew, without a break?"""
        same = self.state == "connected" and self._generation == self._gateway.generation and revision >= self._revision
        self._generation, self._revision = self._gateway.generation, revision
        self._backoff.reset()
        if same:
            return
        self._hub.become_connected()
        self._keeper.poke()
        for queue in self._hub.queues:
            self._restart_watch(queue)

    def _restart_watch(self, queue: WatchQueue) -> None:
        """Begin with a snapshot; while there is no etcd, the heart does this later."""
        if self.state == "connected" and self._group is not None:
            self._watches.restart(queue, self._group)

    def _look_now(self) -> None:
        """A stream broke: find out at once whether etcd is there."""
        if self.state == "connected":
            self._beat_now.set()
