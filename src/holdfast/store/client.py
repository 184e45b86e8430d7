"""Implements the client of the embedded store; the connection is the lease.

Always true: an open client keeps trying to connect; on a new connection it first registers all its keys, then asks for
a snapshot for every watch. A silent server is *lost* after 3 s but its connection is kept, because a frozen process
continues where it stopped. Silence is counted in ticks of our own timer, so that our own freeze is never taken for the
server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import cast

from holdfast.core.address import Address
from holdfast.core.backoff import Backoff
from holdfast.core.ports import Network
from holdfast.core.tasks import done_within
from holdfast.store import messages as m
from holdfast.store.contract import (
    Deleted,
    Put,
    check_key,
    check_value,
)
from holdfast.store.shared import (
    QUEUE_EVENTS_MAX,
    WITHDRAW_TIMEOUT_S,
    LeasedKey,
    StoreClient,
    WatchQueue,
)
from holdfast.wire.connection import ClientConnection, ConnectionEnded, reconnect, watch_silence

# Unsent bytes to a frozen server; with more, calls fail at once instead of queueing.
UNSENT_BYTES_MAX = 8 * 1024 * 1024

Answer = m.Value | m.Done | m.Failed


class StoreConnection(ClientConnection):
    """One connection of an embedded-store client. It reports its end to the owner exactly once; the owner decides from
    its silence whether the server is lost."""

    def __init__(self, owner: EmbeddedStore) -> None:
        super().__init__("store", m.decode_to_client)
        self._owner = owner
        self.welcomed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(m.Hello(m.VERSIONS.first, m.VERSIONS.last, m.VERSIONS.features))

    def on_message(self, message: m.ToClient) -> None:
        if isinstance(message, m.Changed | m.WatchItems):
            self._owner.link_watched(message)
        elif isinstance(message, Answer):
            self.answer(message.call, message)
        elif isinstance(message, m.Welcome):
            self.welcomed = True
        else:
            super().on_message(message)

    def on_received(self) -> None:
        self._owner.link_heard(self)

    def on_closed(self) -> None:
        self._owner.link_closed(self)

    @property
    def reason(self) -> str:
        return f"it refused the connection: {self.ended}" if self.ended.code else str(self.ended)

    async def call(self, make: Callable[[int], m.ToServer]) -> Answer:
        """Send a request and return its answer; raise `ConnectionEnded` if the connection ends first."""
        number = self.next_call()
        return cast(Answer, await self.ask(number, make(number)))


_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
TICK_S = 0.5
PING_TICKS = 2
# 3 s: longer than a loaded machine keeps a healthy process waiting (facts 31), short enough for a timely report.
LOST_TICKS = 6
LOST_S = TICK_S * LOST_TICKS
# A frozen server does not answer our close; it sees it when it runs again.
GOODBYE_S = 1.0


class EmbeddedStore(StoreClient):
    """`Store` over one connection to the embedded server."""

    def __init__(
        self, address: Address, network: Network, rng: random.Random, *, queue_events_max: int = QUEUE_EVENTS_MAX
    ) -> None:
        super().__init__(str(address), "check that the store runs at this address", queue_events_max)
        self._address = address
        self._network = network
        self._backoff = Backoff(rng)
        self._watches: dict[int, WatchQueue] = {}
        self._numbers: dict[WatchQueue, int] = {}
        self._partial: dict[int, list[tuple[str, bytes]]] = {}
        self._next_watch = 0
        self._link: StoreConnection | None = None
        self._ready = asyncio.Event()  # there is a welcomed connection

    async def start(self) -> None:
        assert not len(self._tasks), "started twice"
        self._tasks.spawn(self._run(), "run")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ready.set()  # calls that wait for a connection fail
        await self._tasks.stop()
        self._end_watches()
        if self._link is not None:
            link = self._link
            link.close()
            await done_within(link.closed.wait(), GOODBYE_S)
            link.abort()

    def register(self, key: str, value: bytes) -> LeasedKey:
        leased = LeasedKey(key, value, self)
        self._add_registration(leased)
        self.keep(leased)
        return leased

    async def get(self, key: str, timeout_s: float) -> bytes | None:
        check_key(key)
        answer = await self._call(lambda call: m.Get(call, key), f"get {key}", timeout_s)
        assert isinstance(answer, m.Value)
        return answer.value

    async def put(self, key: str, value: bytes, timeout_s: float) -> None:
        check_key(key)
        check_value(value)
        await self._call(lambda call: m.PutKey(call, key, value, False), f"put {key}", timeout_s)

    async def swap(self, key: str, value: bytes | None, expected: bytes | None, timeout_s: float) -> bool:
        check_key(key)
        check_value(value or b"")
        answer = await self._call(lambda call: m.SwapKey(call, key, value, expected), f"swap {key}", timeout_s)
        return isinstance(answer, m.Done)

    async def delete(self, key: str, timeout_s: float) -> None:
        check_key(key)
        await self._call(lambda call: m.DeleteKey(call, key, False), f"delete {key}", timeout_s)

    # Calls

    async def _call(self, make: Callable[[int], m.ToServer], what: str, timeout_s: float) -> Answer:
        """Send a request until it is answered; repeating it after a reconnect is safe because every request is
        idempotent."""
        async with self._bounded(what, timeout_s):
            answer = await self._ask(make)
        if isinstance(answer, m.Failed):
            raise self._unavailable(f"{what} failed: {answer.reason}")
        return answer

    async def _ask(self, make: Callable[[int], m.ToServer]) -> Answer:
        while True:
            await self._ready.wait()
            if self._closed or self._link is None:
                raise self._unavailable("this client was closed")
            if self._link.unsent_bytes > UNSENT_BYTES_MAX:
                raise self._unavailable("too many bytes wait to be sent")
            with contextlib.suppress(ConnectionEnded):
                return await self._link.call(make)

    # Registrations

    def keep(self, leased: LeasedKey) -> None:
        if self._link is None or not self._ready.is_set() or leased.in_flight or self._closed:
            return
        leased.in_flight = True
        call = self._link.next_call()
        self._link.expect(call, partial(self._kept, leased, leased.value))
        self._link.send(m.PutKey(call, leased.key, leased.value, True))

    def _kept(self, leased: LeasedKey, value: bytes, answer: Answer | None) -> None:
        leased.in_flight = False
        if answer is None or isinstance(answer, m.Failed):
            leased.become_refused(answer.reason if answer else "")  # retried at the next tick or connection
            return
        leased.become_acknowledged(value)
        if not leased.registered and self._registrations.get(leased.key) is leased:
            self.keep(leased)

    async def drop(self, leased: LeasedKey) -> None:
        if self._registrations.get(leased.key) is leased:
            del self._registrations[leased.key]
        if self._link is None or not self._ready.is_set():
            return  # the lease went with the connection
        with contextlib.suppress(TimeoutError, ConnectionEnded):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._link.call(lambda call: m.DeleteKey(call, leased.key, True))

    def _keep_all(self) -> None:
        for leased in self._registrations.values():
            if not leased.registered:
                self.keep(leased)

    # Watches

    def _request_watch(self, queue: WatchQueue) -> None:
        """Request a snapshot and the changes after it, under a new number; events of the old number are dropped."""
        if self._link is None or not self._ready.is_set() or self._closed:
            return
        self._forget_watch(queue)
        self._next_watch += 1
        self._watches[self._next_watch] = queue
        self._numbers[queue] = self._next_watch
        self._link.send(m.WatchPrefix(self._next_watch, queue.prefix))

    def _forget_watch(self, queue: WatchQueue) -> None:
        number = self._numbers.pop(queue, None)
        if number is not None:
            del self._watches[number]
            self._partial.pop(number, None)
            if self._link is not None:
                self._link.send(m.Unwatch(number))

    def link_watched(self, message: m.WatchItems | m.Changed) -> None:
        queue = self._watches.get(message.watch)
        if queue is None:
            return
        if isinstance(message, m.WatchItems):
            items = self._partial.setdefault(message.watch, [])
            items.extend(message.items)
            if message.last:
                queue.offer_snapshot(dict(self._partial.pop(message.watch)))
        elif message.value is None:
            queue.offer_change(Deleted(message.key))
        else:
            queue.offer_change(Put(message.key, message.value))

    # The connection

    def link_heard(self, link: StoreConnection) -> None:
        """Become connected if the client was not: register all keys again, then request all watches."""
        if not link.welcomed or link.closed.is_set() or self.state == "connected" or self._closed:
            return
        self._backoff.reset()
        self._become_connected()
        self._link = link
        self._ready.set()
        self._keep_all()
        for queue in self._queues:
            self._request_watch(queue)

    def link_closed(self, link: StoreConnection) -> None:
        if self._link not in (None, link):
            return  # an abandoned connection attempt, closing late
        self._link = None
        if not self._closed:
            self._ready.clear()
        for leased in self._registrations.values():
            leased.become_lost()
        self._watches.clear()
        self._numbers.clear()
        self._partial.clear()
        self._become_lost(link.reason)

    async def _run(self) -> None:
        connecting_since_s = asyncio.get_running_loop().time()

        async def session() -> bool:
            try:
                await self._listen(await self._connect())
            except OSError:
                raise
            except Exception:
                _log.exception("%r: the connection is dropped", self)
            return False

        def failed(error: Exception) -> None:
            silent_s = asyncio.get_running_loop().time() - connecting_since_s
            if self.state == "lost" or silent_s >= LOST_S:
                self._become_lost(f"cannot connect: {error or 'timed out'}")

        await reconnect(session, self._backoff, failed)

    async def _connect(self) -> StoreConnection:
        link = StoreConnection(self)
        await self._network.connect(self._address, lambda: link, CONNECT_TIMEOUT_S)
        return link

    async def _listen(self, link: StoreConnection) -> None:
        """Watch a connection for silence until it closes."""

        def on_tick(tick: int, silent: int) -> None:
            if tick and self.state == "connected":
                self._keep_all()
            if tick % PING_TICKS == 0 and link.welcomed and silent < LOST_TICKS:
                link.send(m.Ping())

        def on_silent() -> None:
            self._become_lost(f"no answer for {LOST_S:g} s; it may be frozen")

        try:
            await watch_silence(link, tick_s=TICK_S, ticks_max=LOST_TICKS, on_tick=on_tick, on_silent=on_silent)
        finally:
            if link is not self._link or not self._closed:
                link.abort()  # `close` ends a welcomed one itself
