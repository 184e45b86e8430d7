"""Who carries a deployment's rollouts out, and how far it is: one leased record, so that without one nobody does.

Always true: what a steward tells is of the wish whose serial it names; a newer one it has not heard of yet.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from holdfast.discovery.keys import ROLLOUT_STATUS
from holdfast.rollout.status import RolloutReport
from holdfast.store.contract import Store

TIMEOUT_S = 10.0  # as of every call: a store that restarts is back in a second or two


class RolloutStatus(Struct, frozen=True, kw_only=True):
    """One process that carries a deployment's rollouts out, by its own word."""

    pid: int
    host: str
    state_dir: str
    serial: int = 0  # of the wish that it works at (`Wanted.serial`)
    report: RolloutReport | None = None  # None: it has not looked yet
    trouble: str = ""  # why nothing is done

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, in {self.state_dir}"

    def is_at(self, place: RolloutStatus) -> bool:
        """Whether both are of one machine and one state directory, where a lock lets only one be."""
        return (self.host, self.state_dir) == (place.host, place.state_dir)


def encode(steward: RolloutStatus) -> bytes:
    return msgspec.json.encode(steward)


def decode(data: bytes | None) -> RolloutStatus | None:
    """None: nobody carries it out, or somebody of whom nothing can be read."""
    try:
        return msgspec.json.decode(data, type=RolloutStatus) if data is not None else None
    except (msgspec.DecodeError, ValueError):
        return None


async def read_status(store: Store, name: str) -> RolloutStatus | None:
    return decode(await store.get(ROLLOUT_STATUS + name, TIMEOUT_S))
