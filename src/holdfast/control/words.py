"""What `Wards` hear of the workers, and what they ask for: events and effects. Pure.

Always true: an event tells what happened and judges nothing; an effect is complete in itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.control.ward import WorkerFacts
from holdfast.health import breaker as b
from holdfast.health import expectations as x
from holdfast.health import liveness
from holdfast.health.device_faults import Fault
from holdfast.health.records import DeviceRecord, HealthRecord

# -- what happens


@dataclass(frozen=True, slots=True)
class Found:
    """A worker is there and was talked to, or says something else of itself than before (it woke, it loaded afresh).
    `serving`: it may have traffic already, because nobody who could have checked it was there when it came."""

    path: str
    facts: WorkerFacts
    serving: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """It stands in the store, whether or not it can be talked to from here: its record is no dead one's."""

    path: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Its process ended: its key is gone, and so are its connections."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What it answered to the question of that number, all of it."""

    path: str
    number: int
    answer: x.Answer
    took_s: float
    occupancy: float  # running and waiting streams over places, the larger of before and after; without this one


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Nothing whole came within the time, or an error did."""

    path: str
    number: int
    reason: str
    moving: bool = False  # some tokens of the answer came
    sound: bool = True  # another worker was heard of since it was asked, or there is no other
    failed: bool = False  # it said itself that it failed, so that tokens meanwhile do not excuse it


@dataclass(frozen=True, slots=True)
class NoPlace:
    """It did not take the question, for want of room."""

    path: str
    number: int


@dataclass(frozen=True, slots=True)
class Doubted:
    """Something says that it may hang, or answer wrongly, which a question would show."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What the judge of its beats says."""

    path: str
    judged: liveness.Judged


@dataclass(frozen=True, slots=True)
class Reported:
    """What all frontends together saw of it since the last such event."""

    path: str
    attempts: b.Attempts
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Paces:
    """Seconds per token of those that made any lately, measured over the same time; about once a second."""

    paces: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """It says itself that it cannot go on."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceFaulted:
    """`device`: one of those in `WorkerFacts`."""

    device: str
    fault: Fault
    at_s: float


@dataclass(frozen=True, slots=True)
class DeviceCleared:
    device: str
    at_s: float


def device_event(device: str, record: DeviceRecord) -> DeviceFaulted | DeviceCleared:
    """What a device's record says."""
    if record.cleared_unix_s:
        return DeviceCleared(device, record.cleared_unix_s)
    return DeviceFaulted(device, Fault(device, record.severity, record.reason, record.number), record.at_unix_s)


@dataclass(frozen=True, slots=True)
class Verified:
    """It compared its weights with what was written, and they are right."""

    path: str
    load: int


@dataclass(frozen=True, slots=True)
class Spared:
    """It is to be kept without traffic, as a spare, or not any more."""

    path: str
    spare: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline_s` has come."""


Event = (
    Found | Listed | Lost | Answer | NoAnswer | NoPlace | Doubted | Judged | Reported | Paces | EngineFailed
    | DeviceFaulted | DeviceCleared | Verified | Spared | Tick
)  # fmt: skip


# -- what is to be done


@dataclass(frozen=True, slots=True)
class WriteExpected:
    """To be written down before what follows is done; None: it may go."""

    name: str
    record: x.Record | None


@dataclass(frozen=True, slots=True)
class Write:
    """To be written down before what follows is done. Frontends act on it: on its weight, on a fall they have not seen,
    on a drain."""

    path: str
    record: HealthRecord


@dataclass(frozen=True, slots=True)
class Forget:
    """Its record may go."""

    path: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask it this, at temperature 0, past an end of text, with `expectations.TOP` logprobs; tell within the time what
    came of that number."""

    path: str
    number: int
    prompt: tuple[int, ...]
    tokens: int
    within_s: float


@dataclass(frozen=True, slots=True)
class Reload:
    """Have this worker's weights compared with their source and loaded anew, unless their load is above `load` already
    or that is under way. `in_place`: no other set serves, so its streams are held meanwhile."""

    path: str
    load: int
    in_place: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Relieve:
    """Have this worker hand over to its standby and exit. Not `believed`: what it computed is not to be used."""

    path: str
    believed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Flag:
    """What it made since then cannot be believed."""

    path: str
    since_s: float
    reason: str


class What(StrEnum):
    """Of what is told; for logs, metrics and incidents."""

    STATUS = "status"
    MOVED = "moved"  # its streams, by a new fall
    DRAINED = "drained"
    QUARANTINED = "quarantined"
    RELOADED = "reloaded"  # it is asked to
    RELIEVED = "relieved"  # it is asked to hand over to its standby
    ACQUITTED = "acquitted"  # weights, by name
    BREAKER = "breaker"
    PASSED = "canary-passed"
    FAILED = "canary-failed"
    ACCUSED = "accused"
    CONVICTED = "convicted"  # weights, by name
    WITHDRAWN = "withdrawn"  # what a card expects
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Told:
    """`path` is empty where it is about no one worker."""

    path: str
    what: What
    text: str


Effect = WriteExpected | Write | Forget | Ask | Reload | Relieve | Flag | Told
