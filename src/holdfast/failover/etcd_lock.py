"""Implements the election lock across machines: a key in etcd that lives as long as its holder's lease.

A waiter watches until the key is deleted, then creates it, bound to a new lease, if it does not exist. The holder
renews its lease and counts its time from when it *sent* the last renewal that etcd answered. etcd counts from when that
renewal arrived, so the holder's time ends first, at least by the margin.

Always true:

- The lost event is set before the lease can expire at etcd, however late this process runs (lost_event.py).
- A holder that lost the lock does not revoke its lease, so that the margin holds. A release, or a cancelled wait,
  revokes it.
- Connections are open only while the lock is waited for, held or just lost.
- The lease does not fence: processes of the engine that outlive the holder do not keep it (facts 2). The vault's
  registry handles those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

from holdfast.core.backoff import Backoff
from holdfast.core.ports import World
from holdfast.core.tasks import Tasks, done_within, first
from holdfast.failover.lock import LockHolder, read_holder, signature, state_text
from holdfast.failover.lost_event import LostEvent
from holdfast.spec.names import parse_endpoints
from holdfast.store.contract import StoreUnavailable
from holdfast.store.etcd_gateway import (
    Answer,
    Empty,
    EtcdError,
    EtcdGateway,
    EtcdUnreachable,
    KeepAliveResponse,
    KeyValue,
    RangeRequest,
    RangeResponse,
    TxnResponse,
)

_log = logging.getLogger(__name__)

# A dead holder is replaced after this long plus up to a second (etcd checks for expired leases twice a second). With a
# shorter lease, an etcd that is briefly slow, say because of its disk, would end a healthy leader.
LEASE_S = 5
# The part of its lease that a holder does not use: for the last token on its way, and for clocks that differ.
MARGIN_PER_LEASE = 0.25
# Renewals per lease; each has this share of the lease to be answered. Two may fail in a row before the margin begins.
RENEWALS_PER_LEASE = 4
# A revocation only saves time: without it the lease expires by itself.
REVOKE_S = 1.0
OWNER_S = 2.0
# etcd's lease ids are signed 64-bit; 0 would ask etcd to choose one.
LEASE_BITS = 63


class EtcdLock:
    """A `FailoverLock` that is a key in etcd. `url`: etcd://host:port[,host:port…]."""

    def __init__(self, url: str, key: str, engine: str, world: World, lease_s: int = LEASE_S) -> None:
        if lease_s < 1 or not key:
            raise ValueError(f"an etcd lock needs a key and a lease of at least 1 s, got {key!r} and {lease_s}")
        self.url = url
        self.key = key
        self.engine = engine
        self.lease_s = lease_s
        self._clock, self._rng = world.clock, world.rng
        self._lost: LostEvent | None = None
        self._tasks = Tasks(f"lock {url}/{key}")  # one at a time
        self._waiting = False

    def __repr__(self) -> str:
        return f"lock {self.url}/{self.key}: {state_text(self._lost, self._waiting)} by {self.engine}"

    async def acquire(self) -> asyncio.Event:
        if self._lost is not None and not self._lost.is_set():
            return self._lost
        assert not self._waiting, f"{self!r}: acquired twice at once"
        self._waiting = True
        try:
            await self._end()
            granted: asyncio.Future[LostEvent] = asyncio.get_running_loop().create_future()
            candidacy = self._tasks.spawn(self._stand(granted), "candidacy")
            await first((), (candidacy, granted))
            if not granted.done():
                candidacy.result()  # a bug: it ends only when cancelled
            return granted.result()
        except BaseException:
            await self._end()
            raise
        finally:
            self._waiting = False

    async def release(self) -> None:
        if not self._waiting:
            await self._end()

    async def owner(self) -> LockHolder | None:
        with contextlib.suppress(StoreUnavailable):
            async with _open_election(self.url, self.key, self._rng) as election:
                kept, _ = await election.read(OWNER_S)
                return None if kept is None else read_holder(kept.value)
        return None

    def nudge(self) -> None:
        """Do nothing: the lease decides, and etcd reports its end at once."""

    def pass_fds(self) -> tuple[int, ...]:
        return ()

    async def _end(self) -> None:
        """End the candidacy: set the lost event first, then revoke the lease and close everything. Bounded."""
        lost, self._lost = self._lost, None
        if lost is not None:
            lost.set()
        await self._tasks.stop()

    # -- the candidacy: one task, from the first read of the key until the lock is lost

    async def _stand(self, granted: asyncio.Future[LostEvent]) -> None:
        async with _open_election(self.url, self.key, self._rng) as election:
            lease, lost = await self._win(election)
            try:
                self._lost = lost
                granted.set_result(lost)
                await self._keep(election, lease, lost)
            except asyncio.CancelledError:
                await election.revoke(lease, REVOKE_S)
                raise
            finally:
                lost.set()

    async def _win(self, election: _Election) -> tuple[int, LostEvent]:
        """Wait until the key is deleted and try to create it; repeat until won."""
        backoff = Backoff(self._rng)
        while True:
            try:
                kept, revision = await election.read(self.lease_s)
                if kept is not None:
                    # A watch can die silently, so read the key again once per lease.
                    await election.until_deleted(revision, self.lease_s)
                elif (won := await self._race(election)) is not None:
                    return won
                backoff.reset()
            except StoreUnavailable as error:
                _log.warning("%r: %s", self, error)
                await asyncio.sleep(backoff.next_s())

    async def _race(self, election: _Election) -> tuple[int, LostEvent] | None:
        sent_s = asyncio.get_running_loop().time()
        lease = self._rng.getrandbits(LEASE_BITS) or 1
        try:
            await election.grant(lease, self.lease_s, self._patience_s)
            won = await election.create(signature(self.engine, self._clock.unix_s()), lease, self._patience_s)
            if won and not (lost := LostEvent(self._clock, self._deadline_s(sent_s))).is_set():
                return lease, lost
        except BaseException:
            await election.revoke(lease, REVOKE_S)
            raise
        await election.revoke(lease, REVOKE_S)
        return None

    async def _keep(self, election: _Election, lease: int, lost: LostEvent) -> None:
        """Renew the lease until the lock is lost. A deleted or replaced key is a loss too: another engine can be
        elected then."""
        backoff = Backoff(self._rng)
        while not lost.is_set():
            sent_s = asyncio.get_running_loop().time()
            rest_s = self._patience_s
            try:
                if not await election.keep_alive(lease, self._patience_s):
                    return self._say_lost("its lease has passed")
                lost.extend(self._deadline_s(sent_s))
                kept, _ = await election.read(self._patience_s)
                if kept is None or kept.lease != lease:
                    return self._say_lost("its key was removed or replaced")
                backoff.reset()
            except StoreUnavailable as error:
                _log.warning("%r: not renewed: %s", self, error)
                rest_s = backoff.next_s()
            await done_within(lost.wait(), rest_s)
        return self._say_lost("it could not be renewed in time")

    def _say_lost(self, why: str) -> None:
        _log.error("%r: lost: %s", self, why)

    @property
    def _patience_s(self) -> float:
        return self.lease_s / RENEWALS_PER_LEASE

    def _deadline_s(self, sent_s: float) -> float:
        return sent_s + self.lease_s * (1 - MARGIN_PER_LEASE)


# -- etcd


class _Election:
    """One candidate's calls to etcd. Every call may be repeated: a creation whose answer was lost is recognised by its
    lease. A call that etcd declines, or does not answer in time, raises StoreUnavailable."""

    def __init__(self, gateway: EtcdGateway, url: str, key: str) -> None:
        self._gateway = gateway
        self._url = url
        self._key = key.encode()

    async def grant(self, lease: int, ttl_s: int, timeout_s: float) -> None:
        """Create a lease with an id chosen by the caller, so that it can be revoked even if the answer was lost."""
        await self._call("lease/grant", {"ID": lease, "TTL": ttl_s}, Empty, timeout_s)

    async def keep_alive(self, lease: int, timeout_s: float) -> bool:
        """Renew the lease; return False if there is no such lease any more."""
        answer = await self._call("lease/keepalive", {"ID": lease}, KeepAliveResponse, timeout_s)
        return answer.result.TTL > 0

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """Delete the lease and its key; if etcd does not answer, they expire by themselves."""
        with contextlib.suppress(StoreUnavailable):
            await self._call("lease/revoke", {"ID": lease}, Empty, timeout_s)

    async def create(self, value: bytes, lease: int, timeout_s: float) -> bool:
        """Create the key on this lease; return False if it existed on another."""
        there = {"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        put = {"request_put": {"key": self._key, "value": value, "lease": lease}}
        look = {"request_range": {"key": self._key}}
        request = {"compare": [there], "success": [put], "failure": [look]}
        answer = await self._call("kv/txn", request, TxnResponse, timeout_s)
        found = [kept for part in answer.responses for kept in part.response_range.kvs]
        return answer.succeeded or any(kept.lease == lease for kept in found)

    async def read(self, timeout_s: float) -> tuple[KeyValue | None, int]:
        """Return the key (None: it does not exist) and the store's revision."""
        answer = await self._call("kv/range", RangeRequest(self._key), RangeResponse, timeout_s)
        return (answer.kvs[0] if answer.kvs else None), answer.header.revision

    async def until_deleted(self, revision: int, timeout_s: float) -> None:
        """Return when the key was deleted after `revision`, or may have been; at the latest after `timeout_s`."""
        create = {"key": self._key, "start_revision": revision + 1, "filters": ["NOPUT"]}
        watching = self._gateway.watch({"create_request": create})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), contextlib.aclosing(watching) as results:
                try:
                    async for result in results:
                        if result.events or result.canceled:
                            return
                except (EtcdUnreachable, EtcdError) as error:
                    raise self._unavailable(str(error)) from error

    async def _call(self, path: str, request: object, kind: type[Answer], timeout_s: float) -> Answer:
        try:
            return await self._gateway.ask(path, request, kind, timeout_s)
        except TimeoutError:
            raise self._unavailable(f"{path} was not answered within {timeout_s:g} s") from None
        except EtcdError as error:
            raise self._unavailable(f"{path} was declined: {error}") from error

    def _unavailable(self, cause: str) -> StoreUnavailable:
        return StoreUnavailable(self._url, cause, "check that etcd runs at this address and has a leader")


@contextlib.asynccontextmanager
async def _open_election(url: str, key: str, rng: random.Random) -> AsyncIterator[_Election]:
    """Open one candidate's connections; close them on exit."""
    async with EtcdGateway(parse_endpoints(url), rng) as gateway:
        yield _Election(gateway, url, key)
