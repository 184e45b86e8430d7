"""etcd as the keeper of one election: leases, and a key that is created only where there is none.

Always true: every call is bounded; asking twice does no harm: a creation whose answer got lost is recognised by its
lease. What etcd declines, or does not answer, is a StoreUnavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import msgspec

from holdfast.spec.store_urls import parse_endpoints
from holdfast.store.contract import StoreUnavailable
from holdfast.store.etcd_gateway import EtcdGateway
from holdfast.store.etcd_messages import (
    Answer,
    Empty,
    EtcdError,
    EtcdUnreachable,
    Header,
    KeepAliveResponse,
    LeaseRequest,
    RangeRequest,
)


class LeasedValue(msgspec.Struct, frozen=True):
    """The elected one's key, the lease it hangs on, and the revision it was seen at."""

    value: bytes = b""
    lease: int = 0
    revision: int = 0


class _Kept(msgspec.Struct, frozen=True):
    value: bytes = b""
    lease: int = 0


class _RangeAnswer(msgspec.Struct, frozen=True):
    header: Header
    kvs: list[_Kept] = []


class _TxnPart(msgspec.Struct, frozen=True):
    response_range: _RangeAnswer | None = None


class _TxnAnswer(msgspec.Struct, frozen=True):
    succeeded: bool = False
    responses: list[_TxnPart] = []


class EtcdElection:
    """The calls of one candidate; use it inside `open_election`."""

    def __init__(self, gateway: EtcdGateway, url: str, key: str) -> None:
        self._gateway = gateway
        self._url = url
        self._key = key.encode()

    async def grant(self, lease: int, ttl_s: int, timeout_s: float) -> None:
        """A lease under a number that the caller drew, so that it can be revoked even if the answer got lost."""
        await self._call("lease/grant", {"ID": lease, "TTL": ttl_s}, Empty, timeout_s)

    async def keep_alive(self, lease: int, timeout_s: float) -> bool:
        """False: there is no such lease any more."""
        answer = await self._call("lease/keepalive", LeaseRequest(lease), KeepAliveResponse, timeout_s)
        return answer.result.TTL > 0

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """The lease and its key go at once; if etcd does not answer, they run out by themselves."""
        with contextlib.suppress(StoreUnavailable):
            await self._call("lease/revoke", LeaseRequest(lease), Empty, timeout_s)

    async def create(self, value: bytes, lease: int, timeout_s: float) -> bool:
        """True: the key was not there, and now hangs on this lease."""
        there = {"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        put = {"request_put": {"key": self._key, "value": value, "lease": lease}}
        look = {"request_range": {"key": self._key}}
        request = {"compare": [there], "success": [put], "failure": [look]}
        answer = await self._call("kv/txn", request, _TxnAnswer, timeout_s)
        if answer.succeeded:
            return True
        found = [kept for part in answer.responses if part.response_range for kept in part.response_range.kvs]
        return any(kept.lease == lease for kept in found)

    async def read(self, timeout_s: float) -> tuple[LeasedValue | None, int]:
        """The key as it is, and the revision at which it is so."""
        answer = await self._call("kv/range", RangeRequest(self._key), _RangeAnswer, timeout_s)
        revision = answer.header.revision
        kept = answer.kvs[0] if answer.kvs else None
        return (None if kept is None else LeasedValue(kept.value, kept.lease, revision)), revision

    async def until_deleted(self, revision: int, timeout_s: float) -> None:
        """Return when the key was deleted after `revision`, or may have been; at the latest when the time is over."""
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
async def open_election(url: str, key: str, rng: random.Random) -> AsyncIterator[EtcdElection]:
    """Connections for one candidate, closed on exit. `url` is etcd://host:port[,host:port…]."""
    async with EtcdGateway(parse_endpoints(url), rng) as gateway:
        yield EtcdElection(gateway, url, key)
