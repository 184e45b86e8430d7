"""Streams waiting for a worker: resumed ones before new ones, each for a bounded time. Pure; `now` comes in.

Always true: a resumed stream is never refused a place; new ones are refused beyond `fresh_max`; every held
stream leaves by being taken, cancelled or overdue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Stream = TypeVar("Stream", bound=Hashable)


@dataclass(slots=True)
class Held(Generic[Stream]):
    stream: Stream
    since_s: float
    deadline_s: float
    resumed: bool


class HoldQueue(Generic[Stream]):
    """Held streams of one worker set, in the order they will be taken up again."""

    def __init__(self, fresh_max: int) -> None:
        self._fresh_max = fresh_max
        self._resumed: OrderedDict[Stream, Held[Stream]] = OrderedDict()
        self._fresh: OrderedDict[Stream, Held[Stream]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._resumed) + len(self._fresh)

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._resumed or stream in self._fresh

    def hold(self, stream: Stream, now_s: float, deadline_s: float, *, resumed: bool) -> bool:
        """Keep a stream; False if there is no room for another new one."""
        assert stream not in self, "a stream is held once"
        if not resumed and len(self._fresh) >= self._fresh_max:
            return False
        queue = self._resumed if resumed else self._fresh
        queue[stream] = Held(stream, now_s, deadline_s, resumed)
        return True

    def drop(self, stream: Stream) -> None:
        self._resumed.pop(stream, None)
        self._fresh.pop(stream, None)

    def first(self) -> Stream | None:
        """Who is next, still held."""
        for queue in (self._resumed, self._fresh):
            if queue:
                return next(iter(queue))
        return None

    def overdue(self, now_s: float) -> list[Held[Stream]]:
        """Take out all whose time is up."""
        late = [held for held in self if held.deadline_s <= now_s]
        for held in late:
            self.drop(held.stream)
        return late

    def __iter__(self) -> Iterator[Held[Stream]]:
        yield from list(self._resumed.values())
        yield from list(self._fresh.values())
