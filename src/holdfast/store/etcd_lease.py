"""Keeps one client's leased keys in etcd: a single task that compares wishes with what etcd holds.

Always true: all keys hang on one lease; whenever etcd says that it is gone, a new one is granted and every key is put
again; puts and deletes are made one after another, so that the last wish wins.
"""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.core.tasks import set_within
from holdfast.store.backoff import Backoff
from holdfast.store.contract import REGISTRATIONS_MAX
from holdfast.store.etcd_gateway import (
    CODE_NOT_FOUND,
    Empty,
    EtcdError,
    EtcdGateway,
    EtcdUnreachable,
    GrantResponse,
    KeepAliveResponse,
    PutRequest,
)
from holdfast.store.shared import WITHDRAW_TIMEOUT_S, LeasedKey, add_wish

# One request of this task; several fit into a lease's life.
REQUEST_TIMEOUT_S = 2.0
# A keepalive every quarter of the TTL: two may fail before the lease is in danger.
KEEPALIVES_PER_TTL = 4
# What etcd declines (say, no space left) is asked again this often.
REFUSED_RETRY_S = 1.0


class LeaseKeeper:
    """The registrations of one etcd client."""

    def __init__(self, gateway: EtcdGateway, ttl_s: int, backoff: Backoff) -> None:
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._backoff = backoff
        self._lease: int | None = None
        self._renew_at_s = 0.0
        self._poked = asyncio.Event()
        self._withdrawn: dict[str, asyncio.Event] = {}
        self.wishes: dict[str, LeasedKey] = {}

    def register(self, key: str, value: bytes) -> LeasedKey:
        leased = LeasedKey(key, value, self)
        add_wish(self.wishes, leased)
        if (superseded := self._withdrawn.pop(key, None)) is not None:
            superseded.set()
        self.poke()
        return leased

    def poke(self) -> None:
        """Look at the wishes now."""
        self._renew_at_s = 0.0
        self._poked.set()

    def keep(self, leased: LeasedKey) -> None:
        self._poked.set()

    async def drop(self, leased: LeasedKey) -> None:
        if self.wishes.get(leased.key) is not leased:
            return
        del self.wishes[leased.key]
        done = self._withdrawn[leased.key] = asyncio.Event()
        if len(self._withdrawn) > REGISTRATIONS_MAX:
            # Many withdrawals and no etcd to tell: let the whole lease run out and start another.
            self._abandon_lease()
        self._poked.set()
        await set_within(done, WITHDRAW_TIMEOUT_S)

    async def run(self) -> None:
        while True:
            try:
                self._poked.clear()
                await self._renew()
                await self._delete_withdrawn()
                await self._put_wishes()
                self._backoff.reset()
                wait_s = self._idle_s()
            except EtcdUnreachable:
                wait_s = self._backoff.next_s()
            except EtcdError as error:
                if error.code == CODE_NOT_FOUND:
                    self._abandon_lease()
                else:  # a full etcd gives no lease either
                    for leased in self.wishes.values():
                        if not leased.registered:
                            leased.become_refused(str(error))
                wait_s = self._backoff.next_s()
            await set_within(self._poked, wait_s)

    async def revoke(self) -> None:
        """Drop every key now; if etcd does not answer, the lease runs out by itself."""
        if self._lease is not None:
            with contextlib.suppress(EtcdUnreachable, EtcdError):
                await self._gateway.call("lease/revoke", {"ID": self._lease}, Empty, WITHDRAW_TIMEOUT_S)
        self._abandon_lease()

    def _idle_s(self) -> float:
        if self._lease is None:
            return self._ttl_s
        if any(not leased.registered for leased in self.wishes.values()):
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
        if self._lease is None and self.wishes:
            wanted = {"TTL": self._ttl_s}
            granted = await self._gateway.call("lease/grant", wanted, GrantResponse, REQUEST_TIMEOUT_S)
            self._lease = granted.ID
            self._renew_at_s = now_s + self._ttl_s / KEEPALIVES_PER_TTL

    async def _delete_withdrawn(self) -> None:
        for key, done in list(self._withdrawn.items()):
            if self._lease is not None:
                # A newer registrant's key is left alone.
                ours = {"key": key.encode(), "target": "LEASE", "result": "EQUAL", "lease": self._lease}
                request = {"compare": [ours], "success": [{"request_delete_range": {"key": key.encode()}}]}
                await self._gateway.call("kv/txn", request, Empty, REQUEST_TIMEOUT_S)
            done.set()
            if self._withdrawn.get(key) is done:
                del self._withdrawn[key]

    async def _put_wishes(self) -> None:
        for leased in list(self.wishes.values()):
            if leased.registered or self.wishes.get(leased.key) is not leased:
                continue
            lease, value = self._lease, leased.value
            if lease is None:
                return  # the first wish came, or the lease went, while we waited; we have been poked
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
        """Nothing hangs on the old lease any more, or soon will not."""
        self._lease = None
        for leased in self.wishes.values():
            leased.become_lost()
        for done in self._withdrawn.values():
            done.set()
        self._withdrawn.clear()
