"""A Redis stream, and beside it what was told in it: which facts, and how many events.

Always true: events and what is remembered of them are written in one transaction, and only if nobody else has written
since they were last read. So a Redis that lost its last seconds has lost both, and of two who write one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core.errors import UserError
from holdfast.fleet.events import Change, Event, Fact

if TYPE_CHECKING:
    from redis.asyncio import Redis

STREAM = "dispatcher:events"
ANSWER_S = 2.0  # of one call: one that runs answers in a millisecond
LOST = "redis is needed for --redis: pip install 'holdfast-llm[redis]'"
_NUMBER = "number"


class RedisAway(Exception):
    """It does not answer, or takes nothing: full, loading, read-only. What was asked may have been done."""


class Overwritten(Exception):
    """Somebody else has told of this fleet since."""

    def __str__(self) -> str:
        return "another control tells them, too"


class RedisStream:
    """Of one fleet; several may share the stream."""

    def __init__(self, url: str, deployment: str, entries_max: int) -> None:
        self._client = opened(url)
        self._entries_max = entries_max
        # In a cluster of Redis on the stream's own slot: what is in braces is what counts.
        self._told = f"{{{STREAM}}}:told:{deployment}"

    async def told(self) -> tuple[int, dict[str, Fact]]:
        """How many events were, and which facts. RedisAway."""
        held: Mapping[bytes, bytes] = await self._asked(self._client.hgetall(self._told))
        facts = {key.decode(): value for key, value in held.items()}
        number = int(facts.pop(_NUMBER, b"0"))
        return number, {subject: msgspec.json.decode(value, type=Fact) for subject, value in facts.items()}

    async def number(self) -> int:
        """How many events were told. RedisAway."""
        return int(await self._asked(self._client.hget(self._told, _NUMBER)) or 0)

    async def tell(self, number: int, changes: Sequence[Change]) -> None:
        """All of it or nothing, after so many events. RedisAway; Overwritten, if another number stands there."""
        await self._asked(self._transaction(number, changes))

    async def _transaction(self, number: int, changes: Sequence[Change]) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(self._told)
            if int(await pipe.hget(self._told, _NUMBER) or 0) != number:
                raise Overwritten
            pipe.multi()  # type: ignore[no-untyped-call]
            for change in changes:
                if change.event is not None:
                    number += 1
                    entry = {"id": change.id(number), **fields(change.event)}
                    pipe.xadd(STREAM, entry, maxlen=self._entries_max, approximate=True)
                if change.now is None:
                    pipe.hdel(self._told, change.subject)
                else:
                    pipe.hset(self._told, change.subject, msgspec.json.encode(change.now))
            pipe.hset(self._told, _NUMBER, number)
            await pipe.execute()

    async def _asked(self, call: Any) -> Any:
        from redis.exceptions import RedisError, WatchError

        try:
            return await call
        except WatchError as error:
            raise Overwritten from error
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            raise RedisAway(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._client.aclose()


def check_redis(url: str) -> None:
    """UserError, if it cannot be one; "" is none."""
    if url:
        opened(url)


def opened(url: str) -> Redis:
    """UserError, if it cannot be one; nothing is asked yet."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise UserError(LOST) from error
    try:
        bounds: dict[str, Any] = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "max_connections": 2}
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **bounds)
    except ValueError as error:
        raise UserError(f"--redis: {error}") from error


def fields(event: Event) -> dict[Any, Any]:
    """As an entry of the stream has them: flat, and none that says nothing."""
    said: dict[Any, Any] = {
        "event_type": event.event_type.value,
        "timestamp": f"{event.timestamp:.3f}",
        "deployment": event.deployment,
        "model_key": event.model_key,
        "replica_id": event.replica_id,
        "data": msgspec.json.encode(event.data).decode(),
    }
    return {name: value for name, value in said.items() if value}
