"""Writes events to a Redis stream, and a hash with the facts and the number of events sent so far.

Always true: events and hash are written in one transaction, and only if no other control has written since they were
last read. So if Redis loses its last seconds it loses both, and of two writers one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core.errors import UserError
from holdfast.fleet.events import Fact, FactChange, FleetEvent

if TYPE_CHECKING:
    from redis.asyncio import Redis

STREAM = "dispatcher:events"
ANSWER_S = 2.0  # timeout of one call: a live Redis answers in a millisecond
LOST = "redis is needed for --redis: pip install 'holdfast-llm[redis]'"
_NUMBER = "number"


class RedisUnavailable(Exception):
    """Redis does not answer or refuses writes (full, loading, read-only). The write may still have happened."""


class Overwritten(Exception):
    """Another control has written this fleet's events since they were last read."""

    def __str__(self) -> str:
        return "another control tells them, too"


class RedisStream:
    """Writes one fleet's events to the stream, which several fleets may share."""

    def __init__(self, url: str, deployment: str, entries_max: int) -> None:
        self._client = opened(url)
        self._entries_max = entries_max
        # The braces put the hash into the stream's slot of a Redis cluster.
        self._sent_key = f"{{{STREAM}}}:told:{deployment}"

    async def read_sent(self) -> tuple[int, dict[str, Fact]]:
        """Return the number of events sent, and the facts by subject. Raises RedisUnavailable."""
        held: Mapping[bytes, bytes] = await self._asked(self._client.hgetall(self._sent_key))
        facts = {key.decode(): value for key, value in held.items()}
        number = int(facts.pop(_NUMBER, b"0"))
        return number, {subject: msgspec.json.decode(value, type=Fact) for subject, value in facts.items()}

    async def number(self) -> int:
        """Return the number of events sent. Raises RedisUnavailable."""
        return int(await self._asked(self._client.hget(self._sent_key, _NUMBER)) or 0)

    async def write(self, number: int, changes: Sequence[FactChange]) -> None:
        """Write all changes or none. Raises RedisUnavailable; Overwritten if `number` is not the number of events sent
        so far."""
        await self._asked(self._transaction(number, changes))

    async def _transaction(self, number: int, changes: Sequence[FactChange]) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(self._sent_key)
            if int(await pipe.hget(self._sent_key, _NUMBER) or 0) != number:
                raise Overwritten
            pipe.multi()  # type: ignore[no-untyped-call]
            for change in changes:
                if change.event is not None:
                    number += 1
                    entry = {"id": change.id(number), **fields(change.event)}
                    pipe.xadd(STREAM, entry, maxlen=self._entries_max, approximate=True)
                if change.now is None:
                    pipe.hdel(self._sent_key, change.subject)
                else:
                    pipe.hset(self._sent_key, change.subject, msgspec.json.encode(change.now))
            pipe.hset(self._sent_key, _NUMBER, number)
            await pipe.execute()

    async def _asked(self, call: Any) -> Any:
        from redis.exceptions import RedisError, WatchError

        try:
            return await call
        except WatchError as error:
            raise Overwritten from error
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            raise RedisUnavailable(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._client.aclose()


def check_redis(url: str) -> None:
    """Raise UserError if the URL is invalid; an empty one is allowed."""
    if url:
        opened(url)


def opened(url: str) -> Redis:
    """Return a client without connecting. Raises UserError if the URL is invalid or the redis package is missing."""
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


def fields(event: FleetEvent) -> dict[Any, Any]:
    """Return the event as fields of a stream entry: flat, without empty ones."""
    said: dict[Any, Any] = {
        "event_type": event.event_type.value,
        "timestamp": f"{event.timestamp:.3f}",
        "deployment": event.deployment,
        "model_key": event.model_key,
        "replica_id": event.replica_id,
        "data": msgspec.json.encode(event.data).decode(),
    }
    return {name: value for name, value in said.items() if value}
