"""Implements the store's client for etcd, through its JSON gateway.

Always true:

- A heartbeat sends etcd a cheap request every second and sets the client's state. No answer for 3 s (a frozen etcd
  keeps its connections open) or two failures in a row are an outage, reported once.
- After an outage, or if answers come from another endpoint or an older revision, every watch starts again with a
  snapshot.
- If only a watch's stream breaks, it continues from the revision after the last complete one; if etcd no longer has
  that history, a new snapshot is read.
- A snapshot is of one revision, even if it takes several pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.backoff import Backoff
from holdfast.core.tasks import done_within
from holdfast.store.contract import (
    REGISTRATIONS_MAX,
    Deleted,
    Put,
    check_key,
    check_value,
)
from holdfast.store.etcd_gateway import (
    CODE_NOT_FOUND,
    CODE_RESOURCE_EXHAUSTED,
    Answer,
    Empty,
    EtcdError,
    EtcdGateway,
    EtcdUnreachable,
    GrantResponse,
    KeepAliveResponse,
    PutRequest,
    RangeRequest,
    RangeResponse,
    TxnResponse,
    WatchResult,
)
from holdfast.store.shared import (
    QUEUE_EVENTS_MAX,
    WITHDRAW_TIMEOUT_S,
    LeasedKey,
    StoreClient,
    WatchQueue,
)

# Keys per page of a snapshot; if an answer is too large for etcd's gateway, the page is requested again, smaller.
PAGE_KEYS = 512
SNAPSHOT_TIMEOUT_S = 5.0


async def read_prefix(gateway: EtcdGateway, prefix: str, timeout_s: float) -> tuple[dict[str, bytes], int]:
    """Return all keys under a prefix at one revision, and that revision."""
    start, end = prefix.encode() or b"\0", range_end(prefix.encode())
    items: dict[str, bytes] = {}
    page_keys, revision = PAGE_KEYS, 0
    while True:
        request = RangeRequest(start, end, limit=page_keys, revision=revision)
        try:
            answer = await gateway.ask("kv/range", request, RangeResponse, timeout_s)
        except EtcdError as error:
            if error.code != CODE_RESOURCE_EXHAUSTED or page_keys == 1:
                raise
            page_keys = max(1, page_keys // 8)
            continue
        revision = revision or answer.header.revision
        for kv in answer.kvs:
            with contextlib.suppress(UnicodeDecodeError):  # another application's key
                items[kv.key.decode()] = kv.value
        if not answer.more:
            return items, revision
        start = answer.kvs[-1].key + b"\0"


class WatchTasks:
    """The tasks behind a client's watches: each reads a snapshot, then follows the changes after it. They call
    `on_break` for every broken stream."""

    def __init__(self, gateway: EtcdGateway, rng: random.Random, on_break: Callable[[], None]) -> None:
        self._gateway = gateway
        self._rng = rng
        self._on_break = on_break
        self._tasks: dict[WatchQueue, asyncio.Task[None]] = {}

    def restart(self, queue: WatchQueue, group: asyncio.TaskGroup) -> None:
        """Start a watch's task, or restart it, with a snapshot."""
        self.stop(queue)
        self._tasks[queue] = group.create_task(self._follow(queue))

    def stop(self, queue: WatchQueue) -> None:
        task = self._tasks.pop(queue, None)
        if task is not None:
            task.cancel()

    async def _follow(self, queue: WatchQueue) -> None:
        backoff = Backoff(self._rng)
        revision = 0
        while True:
            try:
                if revision == 0:
                    revision = await self._snapshot(queue)
                async with contextlib.aclosing(
                    self._gateway.watch(watch_request(queue.prefix.encode(), revision + 1))
                ) as results:
                    async for result in results:
                        backoff.reset()
                        if result.canceled or result.header.revision < revision:
                            break  # compacted, or etcd has another history
                        revision = _tell(queue, result, revision)
                revision = 0
            except (EtcdUnreachable, TimeoutError):
                self._on_break()
            except EtcdError as error:
                _log.warning("watch of %r starts again: %s", queue.prefix, error)
                revision = 0
            await asyncio.sleep(backoff.next_s())

    async def _snapshot(self, queue: WatchQueue) -> int:
        async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
            items, revision = await read_prefix(self._gateway, queue.prefix, SNAPSHOT_TIMEOUT_S)
        queue.offer_snapshot(items)
        return revision


def _tell(queue: WatchQueue, result: WatchResult, revision: int) -> int:
    """Queue the events of one line; return the last complete revision."""
    for event in result.events:
        with contextlib.suppress(UnicodeDecodeError):  # another application's key
            key = event.kv.key.decode()
            queue.offer_change(Deleted(key) if event.type == "DELETE" else Put(key, event.kv.value))
    if not result.events or result.fragment:
        return revision
    return max(revision, result.events[-1].kv.mod_revision)


def range_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with this prefix; a single NUL means the end of the keyspace."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def watch_request(prefix: bytes, start_revision: int) -> object:
    """Return a watch request. Fragments keep each line small, however much one revision changed."""
    create = {
        "key": prefix or b"\0",
        "range_end": range_end(prefix),
        "start_revision": start_revision,
        "fragment": True,
    }
    return {"create_request": create}


# For one request of the lease keeper; several fit into a lease's TTL.
REQUEST_TIMEOUT_S = 2.0
# A keepalive every quarter of the TTL: two may fail before the lease is in danger.
KEEPALIVES_PER_TTL = 4
# Interval for retrying what etcd refuses (for example, no space left).
REFUSED_RETRY_S = 1.0


class LeaseKeeper:
    """Keeps one client's leased keys in etcd: one task compares the desired keys with what etcd holds.

    Always true: all keys are on one lease; if that lease no longer exists, the keeper requests a new one and puts every
    key again; puts and deletes are sent one after another, so that the last one wins."""

    def __init__(self, gateway: EtcdGateway, ttl_s: int, backoff: Backoff, registrations: dict[str, LeasedKey]) -> None:
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._backoff = backoff
        self._lease: int | None = None
        self._renew_at_s = 0.0
        self._poked = asyncio.Event()
        self._withdrawn: dict[str, asyncio.Event] = {}
        self._desired = registrations

    def on_registered(self, key: str) -> None:
        if (superseded := self._withdrawn.pop(key, None)) is not None:
            superseded.set()
        self.poke()

    def poke(self) -> None:
        """Renew the lease and reconcile the keys now."""
        self._renew_at_s = 0.0
        self._poked.set()

    def keep(self, leased: LeasedKey) -> None:
        self._poked.set()

    async def drop(self, leased: LeasedKey) -> None:
        if self._desired.get(leased.key) is not leased:
            return
        del self._desired[leased.key]
        done = self._withdrawn[leased.key] = asyncio.Event()
        if len(self._withdrawn) > REGISTRATIONS_MAX:
            # Many withdrawals while etcd is unreachable: let the whole lease expire and start another.
            self._abandon_lease()
        self._poked.set()
        await done_within(done.wait(), WITHDRAW_TIMEOUT_S)

    async def run(self) -> None:
        while True:
            try:
                self._poked.clear()
                await self._renew()
                await self._delete_withdrawn()
                await self._put_registrations()
                self._backoff.reset()
                wait_s = self._idle_s()
            except EtcdUnreachable:
                wait_s = self._backoff.next_s()
            except EtcdError as error:
                if error.code == CODE_NOT_FOUND:
                    self._abandon_lease()
                else:  # a full etcd grants no lease either
                    for leased in self._desired.values():
                        if not leased.registered:
                            leased.become_refused(str(error))
                wait_s = self._backoff.next_s()
            await done_within(self._poked.wait(), wait_s)

    async def revoke(self) -> None:
        """Drop every key now; if etcd does not answer, the lease expires by itself."""
        if self._lease is not None:
            with contextlib.suppress(EtcdUnreachable, EtcdError):
                await self._gateway.call("lease/revoke", {"ID": self._lease}, Empty, WITHDRAW_TIMEOUT_S)
        self._abandon_lease()

    def _idle_s(self) -> float:
        if self._lease is None:
            return self._ttl_s
        if any(not leased.registered for leased in self._desired.values()):
            return REFUSED_RETRY_S
        return max(0.0, self._renew_at_s - asyncio.get_running_loop().time())

    async def _renew(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._lease is not None and now_s >= self._renew_at_s:
            lease = {"ID": self._lease}
            answer = await self._gateway.call("lease/keepalive", lease, KeepAliveResponse, REQUEST_TIMEOUT_S)
            self._renew_at_s = now_s + self._ttl_s / KEEPALIVES_PER_TTL
            if answer.result.TTL <= 0:
                self._abandon_lease()
        if self._lease is None and self._desired:
            wanted = {"TTL": self._ttl_s}
            granted = await self._gateway.call("lease/grant", wanted, GrantResponse, REQUEST_TIMEOUT_S)
            self._lease = granted.ID
            self._renew_at_s = now_s + self._ttl_s / KEEPALIVES_PER_TTL

    async def _delete_withdrawn(self) -> None:
        for key, done in list(self._withdrawn.items()):
            if self._lease is not None:
                # A newer registrant's key stays.
                ours = {"key": key.encode(), "target": "LEASE", "result": "EQUAL", "lease": self._lease}
                request = {"compare": [ours], "success": [{"request_delete_range": {"key": key.encode()}}]}
                await self._gateway.call("kv/txn", request, Empty, REQUEST_TIMEOUT_S)
            done.set()
            if self._withdrawn.get(key) is done:
                del self._withdrawn[key]

    async def _put_registrations(self) -> None:
        for leased in list(self._desired.values()):
            if leased.registered or self._desired.get(leased.key) is not leased:
                continue
            lease, value = self._lease, leased.value
            if lease is None:
                return  # the first key came, or the lease went, meanwhile: `_poked` is set
            request = PutRequest(leased.key.encode(), value, lease)
            try:
                await self._gateway.call("kv/put", request, Empty, REQUEST_TIMEOUT_S)
            except EtcdError as error:
                leased.become_refused(str(error))
                if error.code == CODE_NOT_FOUND:
                    raise
            else:
                if self._lease == lease:
                    leased.become_acknowledged(value)

    def _abandon_lease(self) -> None:
        """Forget the lease, which is gone or expires soon; all keys must be put again."""
        self._lease = None
        for leased in self._desired.values():
            leased.become_lost()
        for done in self._withdrawn.values():
            done.set()
        self._withdrawn.clear()


_log = logging.getLogger(__name__)

HEART_INTERVAL_S = 1.0
HEART_TIMEOUT_S = 3.0
# One failure may be a stale connection of the pool; two in a row are an outage.
REFUSALS_LOST = 2


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Settings of the etcd client. `lease_ttl_s`: how long etcd keeps the keys of a client that has died (s)."""

    lease_ttl_s: int = 10
    queue_events_max: int = QUEUE_EVENTS_MAX


DEFAULT_SETTINGS = EtcdSettings()


class EtcdStore(StoreClient):
    """`Store` over etcd; `endpoints` are host:port."""

    def __init__(
        self, endpoints: tuple[str, ...], rng: random.Random, settings: EtcdSettings = DEFAULT_SETTINGS
    ) -> None:
        mend = "check that etcd runs at this address and has a leader"
        super().__init__("etcd://" + ",".join(endpoints), mend, settings.queue_events_max)
        self._gateway = EtcdGateway(endpoints, rng)
        self._keeper = LeaseKeeper(self._gateway, settings.lease_ttl_s, Backoff(rng), self._registrations)
        self._watches = WatchTasks(self._gateway, rng, self._look_now)
        self._backoff = Backoff(rng)
        self._group: asyncio.TaskGroup | None = None
        self._beat_now = asyncio.Event()
        self._generation = 0
        self._revision = 0

    async def start(self) -> None:
        assert not len(self._tasks), "started twice"
        await self._gateway.__aenter__()
        self._tasks.spawn(self._run(), "run")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_watches()
        if len(self._tasks):
            await self._tasks.stop()
            await self._keeper.revoke()
            await self._gateway.__aexit__(None, None, None)

    def register(self, key: str, value: bytes) -> LeasedKey:
        leased = LeasedKey(key, value, self._keeper)
        self._add_registration(leased)
        self._keeper.on_registered(key)
        return leased

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

    # Calls

    async def _call(self, path: str, request: object, kind: type[Answer], what: str, timeout_s: float) -> Answer:
        """Send a request within this client's limits; raise StoreUnavailable if it fails."""
        async with self._bounded(what, timeout_s):
            try:
                return await self._gateway.ask(path, request, kind, timeout_s)
            except EtcdError as error:
                raise self._unavailable(f"{what} failed: {error}") from error

    # The heartbeat

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as self._group:
                    self._group.create_task(self._keeper.run())
                    self._group.create_task(self._heart())
            except Exception as error:
                _log.exception("%r: starting over", self)
                self._become_lost(f"internal error: {error!r}")
            finally:
                self._group = None
            await asyncio.sleep(HEART_INTERVAL_S)

    async def _heart(self) -> None:
        """Send a heartbeat every second, or at once after `_look_now`; with backoff after failures."""
        failures = 0
        while True:
            self._beat_now.clear()
            failures = 0 if await self._beat(failures) else failures + 1
            rest_s = self._backoff.next_s() if failures else HEART_INTERVAL_S
            await done_within(self._beat_now.wait(), rest_s)

    async def _beat(self, failures: int) -> bool:
        """Send one heartbeat and update the state; return False if it was not answered."""
        loop = asyncio.get_running_loop()
        asked_at_s = loop.time()
        request = RangeRequest(b"\0", limit=1, count_only=True)
        try:
            answer = await self._gateway.call("kv/range", request, RangeResponse, HEART_TIMEOUT_S)
        except (EtcdUnreachable, EtcdError) as error:
            took_s = loop.time() - asked_at_s
            refused = took_s < HEART_TIMEOUT_S / 2
            # Much longer than our own timeout: this process was stopped, so it says nothing about etcd.
            if took_s < HEART_TIMEOUT_S + 1 and (not refused or failures + 1 >= REFUSALS_LOST):
                self._become_lost(str(error))
            return False
        self._on_heartbeat_answer(answer.header.revision)
        return True

    def _on_heartbeat_answer(self, revision: int) -> None:
        """Handle an answer: after an outage, or from another endpoint or history, restart all watches and put all
        keys."""
        same = self.state == "connected" and self._generation == self._gateway.generation and revision >= self._revision
        self._generation, self._revision = self._gateway.generation, revision
        self._backoff.reset()
        if same:
            return
        self._become_connected()
        self._keeper.poke()
        for queue in self._queues:
            self._request_watch(queue)

    def _request_watch(self, queue: WatchQueue) -> None:
        if self.state == "connected" and self._group is not None:
            self._watches.restart(queue, self._group)

    def _forget_watch(self, queue: WatchQueue) -> None:
        self._watches.stop(queue)

    def _look_now(self) -> None:
        """Send a heartbeat at once: a stream broke, and etcd may be gone."""
        if self.state == "connected":
            self._beat_now.set()
