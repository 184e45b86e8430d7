"""What is said to and by the machine of the KV pool (pool_machine.py): events and effects, nothing else.

Always true: a session is one client connection and a process one pidfd in the vault's registry, both by number;
an event to which no `Refuse` for its session is among the effects, was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """Why something is refused."""

    STALE_EPOCH = "stale_epoch"  # not newer than one already granted, or no longer the owner's
    NOT_GRANTED = "not_granted"  # an epoch that owns nothing yet
    NOT_OWNER = "not_owner"
    NOT_REGISTERED = "not_registered"  # the session has named no process that maps the device
    BUSY = "busy"  # the session waits, owns, or has mapped under an epoch it has not quiesced
    POOL_HERE = "pool_here"  # a donation where a pool is
    TOO_MANY = "too_many"


# -- events


@dataclass(frozen=True, slots=True)
class MapperJoined:
    """A process maps the device. Without an epoch it is a standby, which queues no work on the pool's pages.

    A session names its process before it acquires, and one connection may name several. Ranks and helpers of the owner
    join under its epoch and are acknowledged before they touch a page.
    """

    session: int
    epoch: int | None
    process: int


@dataclass(frozen=True, slots=True)
class Acquire:
    """The election's winner asks for the pool."""

    session: int
    epoch: int
    geometry_hash: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PoolMade:
    """The owner's fresh pool is complete, its pages and index recorded: from now on it can be adopted."""

    session: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Donate:
    """After vault and keeper both died: the owner, alive all the time, gives its pool back and goes on owning it."""

    session: int
    epoch: int
    geometry_hash: str
    made_epoch: int  # under which its pages were made


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The session's processes have drained the device and dropped write access (planned handover)."""

    session: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop waiting; never refused, since it may cross an answer on its way. A grant is given back by `Quiesced`."""

    session: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection ended: no thread of whoever held it runs any more (facts 4b)."""

    session: int


@dataclass(frozen=True, slots=True)
class ProcessOver:
    """The pidfd is readable: what the process had queued on the GPU is over (facts 1, 4a)."""

    process: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = MapperJoined | Acquire | PoolMade | Donate | Quiesced | Cancel | Gone | ProcessOver | Tick


# -- effects


@dataclass(frozen=True, slots=True)
class CpuFence:
    """Nobody who mapped under an earlier epoch can queue work any more. Always just before the grant."""

    session: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantPool:
    """The pool is this session's: the one made under `made_epoch`, or (0) one it is to make, past both fences."""

    session: int
    epoch: int
    made_epoch: int

    @property
    def adopt(self) -> bool:
        return self.made_epoch > 0


@dataclass(frozen=True, slots=True)
class Made:
    """The pool made under this epoch is complete: it can be mapped, and adopted later."""

    epoch: int


@dataclass(frozen=True, slots=True)
class GpuFence:
    """What they had queued is over too: blocks that were open, and direct memory, are usable again. After the grant."""

    session: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The owner has ended or stepped back; pages and index stay, if the pool was complete (else `DropPool` follows)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DropPool:
    """Drop pages, index and record: another geometry takes over, or the owner ended before the pool was complete."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    session: int
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    session: int


Effect = CpuFence | GrantPool | Made | GpuFence | Orphaned | DropPool | Refuse | TimedOut
