"""Decides which frontend gets the next free slot (room for one stream) of a full worker. Pure.

Several frontends share a worker and do not know of each other, so only the worker can be fair:

- The worker turns away a request that finds no slot and puts its frontend in line. The request never ran, so this is
  no failure.
- The worker *keeps* the next free slot for the frontend in line with the fewest streams here, and tells it so.
- That frontend sends a request, or passes and leaves the line.

A frontend that wants few slots therefore gets them, and the others get equal shares.

While capacity is short, some requests may not use every slot (`routing.degradation`):

- Such a request must *leave* some slots free for other requests.
- If no more than these are free, nothing is kept for a frontend whose last request was turned away under this bound.
- Such a request cannot use a slot that was kept for requests without the bound.
- When a frontend cancels a request that was turned away, its bound is forgotten: the frontend is offered any slot.

Always true:

- Every kept slot is free, and is kept for a frontend in line.
- A kept slot is given up after `KEEP_S`, because a frozen frontend must not hold one. That frontend gets no other
  offer until it sends something.
- A frontend stays in line until it passes or disconnects: it sends nothing until it is offered a slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)

# A frontend answers an offer in the pass that reads it: a millisecond, on a swamped machine some hundreds.
KEEP_S = 1.0


@dataclass(slots=True)
class _Turn:
    kept: int = 0
    until_s: float = 0.0  # when the kept slots are given up
    leaves: int = 0  # free slots that its last request must leave to others
    kept_for: int = 0  # `leaves` when the slots were kept: a request that leaves more cannot use them
    silent: bool = False  # it did not answer its last offer in time


class SlotQueue(Generic[Peer]):
    """The line of frontends that wait for a slot, and the slots kept for them."""

    def __init__(self) -> None:
        self._line: dict[Peer, _Turn] = {}  # in the order of their last offers
        self.kept = 0

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._line

    def turn_away(self, peer: Peer, leaves: int = 0) -> None:
        """Put a frontend in line, or leave it there; `leaves` is the bound of the request that found no slot."""
        self._line.setdefault(peer, _Turn()).leaves = leaves

    def admit(self, peer: Peer, free: int, leaves: int = 0) -> bool:
        """Return whether a request of `peer` may use one of `free` slots. A slot kept for `peer` is used first."""
        turn = self._line.get(peer)
        if turn is not None:
            turn.silent = False
        if turn is not None and turn.kept:
            turn.kept -= 1
            self.kept -= 1
            if leaves <= turn.kept_for:
                leaves = 0  # the slot was kept for such a request
        return free - leaves > self.kept

    def leave(self, peer: Peer) -> None:
        """Remove a frontend from the line, with its kept slots: it passed or disconnected."""
        turn = self._line.pop(peer, None)
        if turn is not None:
            self.kept -= turn.kept

    def decline(self, peer: Peer) -> None:
        """Give up the slots kept for a frontend; it stays in line."""
        turn = self._line.get(peer)
        if turn is not None:
            self.kept -= turn.kept
            turn.kept, turn.silent = 0, False

    def forget_bound(self, peer: Peer) -> None:
        """Forget how many slots the frontend must leave free: its last request may have been cancelled."""
        turn = self._line.get(peer)
        if turn is not None:
            turn.leaves = 0

    def clear(self) -> None:
        self._line.clear()
        self.kept = 0

    def offer(self, free: int, streams_of: Callable[[Peer], int], now_s: float) -> dict[Peer, int]:
        """Keep free slots for frontends in line; return the number for each. A frontend with an unanswered offer gets
        no other."""
        for turn in self._line.values():
            if turn.kept and turn.until_s <= now_s:
                self.kept -= turn.kept
                turn.kept, turn.silent = 0, True
        spare = free - self.kept
        fewest = [
            (streams_of(peer), position, peer)
            for position, (peer, turn) in enumerate(self._line.items())
            if not (turn.kept or turn.silent)
        ]
        offers: dict[Peer, int] = {}
        heapq.heapify(fewest)
        while fewest and spare > 0:
            streams, position, peer = fewest[0]
            if spare <= self._line[peer].leaves:
                heapq.heappop(fewest)
                continue
            heapq.heapreplace(fewest, (streams + 1, position, peer))  # positions differ: `peer` is never compared
            offers[peer] = offers.get(peer, 0) + 1
            spare -= 1
        for peer, slots in offers.items():
            turn = self._line[peer] = self._line.pop(peer)
            turn.kept, turn.until_s, turn.kept_for = slots, now_s + KEEP_S, turn.leaves
            self.kept += slots
        return offers

    @property
    def given_up_at_s(self) -> float | None:
        """Return when the first kept slot is given up; None while none is kept."""
        return min((turn.until_s for turn in self._line.values() if turn.kept), default=None)

    def __repr__(self) -> str:
        return f"<SlotQueue {len(self._line)} in line, {self.kept} slots kept>"
