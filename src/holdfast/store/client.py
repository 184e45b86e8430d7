"""A client of the embedded store: the connection is the lease.

Always true: while this object is open it seeks a connection; on a new one it first registers everything, then asks
for a snapshot for every watch. A server that falls silent is *lost* after 3 s but its connection is kept, because a
frozen process that thaws goes on where it stopped. Silence is counted in ticks of our own timer, so that our own
freeze is never taken for the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from functools import partial

from holdfast.core.address import Address
from holdfast.core.ports import Network
from holdfast.core.tasks import Tasks, set_within
from holdfast.store import messages as m
from holdfast.store.backoff import Backoff
from holdfast.store.contract import (
    Deleted,
    Put,
    State,
    check_key,
    check_value,
)
from holdfast.store.link import Answer, Link, LinkClosed
from holdfast.store.shared import QUEUE_EVENTS_MAX, WITHDRAW_TIMEOUT_S, LeasedKey, WatchHub, WatchQueue, add_wish

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
TICK_S = 0.5
PING_TICKS = 2
# 3 s: longer than a loaded machine keeps a healthy process waiting (facts 31), short enough to tell people soon.
LOST_TICKS = 6
LOST_S = TICK_S * LOST_TICKS
# A frozen server cannot take our goodbye; its kernel tells it when it thaws.
GOODBYE_S = 1.0


class EmbeddedStore:
    """`Store` over one connection to the embedded server."""

    def __init__(
        self, address: Address, network: Network, rng: random.Random, *, queue_events_max: int = QUEUE_EVENTS_MAX
    ) -> None:
        self._address = address
        self._network = network
        self._backoff = Backoff(rng)
        self._hub = WatchHub(
            str(address),
            "check that the store runs at this address",
            on_refetch=self._request_watch,
            on_close=self._forget_watch,
            events_max=queue_events_max,
        )
        self._wishes: dict[str, LeasedKey] = {}
        self._watches: dict[int, WatchQueue] = {}
        self._numbers: dict[WatchQueue, int] = {}
        self._partial: dict[int, list[tuple[str, bytes]]] = {}
        self._next_watch = 0
        self._link: Link | None = None
        self._ready = asyncio.Event()  # a welcomed link is there
        self._tasks = Tasks(f"store {address}")
        self._closed = False

    @property
    def state(self) -> State:
        return self._hub.state

    def __repr__(self) -> str:
        return self._hub.status(self._wishes.values(), closed=self._closed)

    async def start(self) -> None:
        assert not len(self._tasks), "started twice"
        self._tasks.spawn(self._run(), "run")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ready.set()  # whoever waits for a connection learns that there will be none
        await self._tasks.stop()
        self._hub.close()
        if self._link is not None:
            link = self._link
            link.close()
            await set_within(link.closed, GOODBYE_S)
            link.abort()

    def register(self, key: str, value: bytes) -> LeasedKey:
        leased = LeasedKey(key, value, self)
        add_wish(self._wishes, leased)
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

    def watch(self, prefix: str) -> WatchQueue:
        queue = self._hub.add(prefix)
        self._request_watch(queue)
        return queue

    # Calls

    async def _call(self, make: Callable[[int], m.ToServer], what: str, timeout_s: float) -> Answer:
        """Ask until answered; asking again after a reconnect is safe because every request is idempotent."""
        async with self._hub.call(what, timeout_s):
            answer = await self._ask(make)
        if isinstance(answer, m.Failed):
            raise self._hub.unavailable(f"{what} failed: {answer.reason}")
        return answer

    async def _ask(self, make: Callable[[int], m.ToServer]) -> Answer:
        while True:
            await self._ready.wait()
            if self._closed or self._link is None:
                raise self._hub.unavailable("this client was closed")
            if self._link.congested():
                raise self._hub.unavailable("too many bytes wait to be sent")
            with contextlib.suppress(LinkClosed):
                return await self._link.call(make)

    # Registrations

    def keep(self, leased: LeasedKey) -> None:
        if self._link is None or not self._ready.is_set() or leased.in_flight or self._closed:
            return
        leased.in_flight = True
        call = self._link.number(partial(self._kept, leased, leased.value))
        self._link.send(m.PutKey(call, leased.key, leased.value, True))

    def _kept(self, leased: LeasedKey, value: bytes, answer: Answer) -> None:
        leased.in_flight = False
        if isinstance(answer, m.Failed):
            leased.become_refused(answer.reason)  # tried again at the next tick, or at the next connection
            return
        leased.become_acknowledged(value)
        if not leased.registered and self._wishes.get(leased.key) is leased:
            self.keep(leased)

    async def drop(self, leased: LeasedKey) -> None:
        if self._wishes.get(leased.key) is leased:
            del self._wishes[leased.key]
        if self._link is None or not self._ready.is_set():
            return  # the lease went with the connection
        with contextlib.suppress(TimeoutError, LinkClosed):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._link.call(lambda call: m.DeleteKey(call, leased.key, True))

    def _keep_all(self) -> None:
        for leased in self._wishes.values():
            if not leased.registered:
                self.keep(leased)

    # Watches

    def _request_watch(self, queue: WatchQueue) -> None:
        """Ask for a snapshot and what follows it, under a new number: what the old one still brings is dropped."""
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

    def link_heard(self, link: Link) -> None:
        """The server answers: if it did not before, everything is registered again, then every watch."""
        if not link.welcomed or link.closed.is_set() or self._hub.state == "connected" or self._closed:
            return
        self._backoff.reset()
        self._hub.become_connected()
        self._link = link
        self._ready.set()
        self._keep_all()
        for queue in self._hub.queues:
            self._request_watch(queue)

    def link_closed(self, link: Link) -> None:
        if self._link not in (None, link):
            return  # a connect that was given up, closing late
        self._link = None
        if not self._closed:
            self._ready.clear()
        for leased in self._wishes.values():
            leased.become_lost()
        self._watches.clear()
        self._numbers.clear()
        self._partial.clear()
        self._hub.become_lost(link.reason)

    async def _run(self) -> None:
        connecting_since_s = asyncio.get_running_loop().time()
        while True:
            try:
                await self._listen(await self._connect())
            except (OSError, TimeoutError) as error:
                silent_s = asyncio.get_running_loop().time() - connecting_since_s
                if self.state == "lost" or silent_s >= LOST_S:
                    self._hub.become_lost(f"cannot connect: {error or 'timed out'}")
            except Exception:
                _log.exception("%r: the connection is dropped", self)
            await asyncio.sleep(self._backoff.next_s())

    async def _connect(self) -> Link:
        link = Link(self)
        await self._network.connect(self._address, lambda: link, CONNECT_TIMEOUT_S)
        return link

    async def _listen(self, link: Link) -> None:
        """Stay with a connection until it closes, watching for silence."""
        tick = silent = 0
        try:
            while not link.closed.is_set():
                if tick % PING_TICKS == 0 and link.welcomed and silent < LOST_TICKS:
                    link.send(m.Ping())
                link.quiet = True
                await set_within(link.closed, TICK_S)
                tick += 1
                silent = silent + 1 if link.quiet else 0
                if silent == LOST_TICKS and not link.closed.is_set():
                    self._hub.become_lost(f"no answer for {LOST_S:g} s; it may be frozen")
                if self.state == "connected":
                    self._keep_all()
        finally:
            if link is not self._link or not self._closed:
                link.abort()  # `close` says goodbye to a welcomed one itself
