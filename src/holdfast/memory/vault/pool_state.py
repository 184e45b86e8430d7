"""What there is to know about the KV pool of one device: pages, owner, who maps the device under which epoch (pure).

Always true: the phase and what keeps a fence closed are derived from the seats, never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.memory.vault.pool_words import Acquire


@dataclass(frozen=True, slots=True)
class Seat:
    """One process on one connection. A seat with an epoch stays until it has quiesced, or is closed *and* over."""

    session: int
    process: int
    epoch: int | None = None
    closed: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class Pages:
    geometry_hash: str
    made_epoch: int = 0  # under which they were made; 0: not complete yet (no epoch that is granted is 0)

    @property
    def made(self) -> bool:
        return self.made_epoch > 0


@dataclass(frozen=True, slots=True, repr=False)
class Pool:
    """The state. `last_epoch` is the last one granted; it is the owner's while there is an owner."""

    last_epoch: int = 0
    pages: Pages | None = None
    owner: int | None = None
    gpu_fence_told: bool = False  # to this owner
    seats: tuple[Seat, ...] = ()
    waiters: tuple[Acquire, ...] = ()
    refill_from_s: float = 0.0  # after a total loss no fresh pool is granted before; 0: no such wait

    def __repr__(self) -> str:
        fence = "" if self.owner is None else f", gpu fence {'passed' if self.gpu_fence_told else 'pending'}"
        mapped = sum(not seat.closed for seat in self.seats)
        return f"{self.phase}{fence}, {mapped} mappers, {len(self.seats) - mapped} ending, {len(self.waiters)} waiting"

    @property
    def phase(self) -> str:
        if self.owner is not None:
            return f"OWNED({self.last_epoch})"
        return "ABSENT" if self.pages is None else f"ORPHANED({self.last_epoch})"

    def cpu_blockers(self, epoch: int) -> tuple[Seat, ...]:
        """Who keeps the CPU fence of an epoch closed."""
        return tuple(s for s in self.seats if s.epoch is not None and s.epoch < epoch and not s.closed)

    def gpu_blockers(self, epoch: int) -> tuple[Seat, ...]:
        """Who keeps the GPU fence closed: a seat that is connected, or whose process is not over."""
        return tuple(s for s in self.seats if s.epoch is not None and s.epoch < epoch)

    def epoch_of(self, session: int) -> int | None:
        """The epoch a session works under."""
        return next((s.epoch for s in self.seats if s.session == session and s.epoch is not None), None)
