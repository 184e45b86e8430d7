"""Streams waiting for a worker: resumed ones, then suspects, then new ones, each for a bounded time. Pure.

Always true: a stream that ran before is never refused a place; new ones are refused beyond `fresh_max`; every held
stream leaves by being taken, cancelled or overdue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.routing.table import Standing

Stream = TypeVar("Stream", bound=Hashable)


@dataclass(slots=True)
class Held(Generic[Stream]):
    stream: Stream
    since_s: float
    deadline_s: float
    standing: Standing


class HoldQueue(Generic[Stream]):
    """Held streams of one worker set, in the order they will be taken up again."""

    def __init__(self, fresh_max: int) -> None:
        self._fresh_max = fresh_max
        self._queues: tuple[OrderedDict[Stream, Held[Stream]], ...] = tuple(OrderedDict() for _ in Standing)

    def __len__(self) -> int:
        resumed, suspects, fresh = self._queues
        return len(resumed) + len(suspects) + len(fresh)

    def __contains__(self, stream: Stream) -> bool:
        return any(stream in queue for queue in self._queues)

    def hold(self, stream: Stream, now_s: float, deadline_s: float, standing: Standing) -> bool:
        """Keep a stream; False if there is no room for another new one."""
        assert stream not in self, "a stream is held once"
        queue = self._queues[standing]
        if standing is Standing.FRESH and len(queue) >= self._fresh_max:
            return False
        queue[stream] = Held(stream, now_s, deadline_s, standing)
        return True

    def drop(self, stream: Stream) -> None:
        for queue in self._queues:
            queue.pop(stream, None)

    def first(self) -> Held[Stream] | None:
        """Who is next, still held."""
        return next((next(iter(queue.values())) for queue in self._queues if queue), None)

    @property
    def suspects(self) -> int:
        return len(self._queues[Standing.SUSPECT])

    def overdue(self, now_s: float) -> list[Held[Stream]]:
        """Take out all whose time is up."""
        late = [held for held in self if held.deadline_s <= now_s]
        for held in late:
            self.drop(held.stream)
        return late

    def __iter__(self) -> Iterator[Held[Stream]]:
        for queue in self._queues:
            yield from list(queue.values())
