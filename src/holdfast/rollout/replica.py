"""One replica of a service: what is wanted of it, what is seen of it, and what is remembered. Pure."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from holdfast.health.bounds import UnixS
from holdfast.rollout.revision import Pair

CRASHES_MAX = 3  # in a row: one may be somebody's kill, two its echo


class DesiredState(StrEnum):
    """What a replica is to do."""

    STAND_BY = "stand by"  # beside an old one, until that has handed over
    SERVE = "serve"
    DRAIN = "drain"
    STOP = "stop"


DESIRED_RUNNING = (DesiredState.SERVE, DesiredState.STAND_BY)


class ReplicaStage(StrEnum):
    """What a replica is seen to do."""

    ABSENT = "absent"
    STARTING = "starting"  # or waiting to be started again
    STANDBY = "standing by"
    SERVING = "serving"
    DRAINING = "draining"
    LEAVING = "leaving"  # it was told to stop


class ObservedReplica(Struct, frozen=True, kw_only=True):
    """One replica. A frontend is admitted, and has its whole weight, when it answers."""

    service: str
    set_id: str
    stage: ReplicaStage
    admitted: bool = False  # by a frontend
    weight: float = 0.0  # control's verdict: above 0 its canary passed, at 1 nothing is held against it
    streams: int = 0
    crashes: int = 0  # in a row
    trouble: str = ""  # why it can never serve; reads after its name: `failed its canary: …`
    is_shut: bool = False  # its breaker has opened: its own failures took its traffic away
    how: str = ""  # it last crashed, or what it waits for
    fits_beside: bool = False  # its device has the memory for a second engine

    @property
    def is_broken(self) -> bool:
        return bool(self.trouble) or self.crashes >= CRASHES_MAX


class ReplicaState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    service: str
    set_id: str
    pair: Pair
    desired: DesiredState = field(default=DesiredState.SERVE, name="want")
    # How long it may drain; None: it does not, or has.
    drain_until_s: UnixS | None = field(default=None, name="until_s")
    # When the action that it needs was last returned; None: it needs none, or not yet.
    sent_at_s: UnixS | None = field(default=None, name="asked_s")
    counted: bool = False  # ever
    beside: str = ""  # whose device it shares, and whom it takes over from
