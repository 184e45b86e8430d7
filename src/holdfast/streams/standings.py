"""What control decided of each worker, as a frontend last heard it, and what share of traffic follows from that. Pure.

Theory. A verdict stands in the store and outlives whoever gave it: when control or the store is gone, the last one
holds. Where there is none, a worker may wait a little for its first check, but only where somebody is there to check
it; never an engine of a group, which proved itself when it took over and whose clients wait, nor one that serves
already when the first control comes.

A fall (`health.standing`) moves a worker's streams once. Its number says whether it is news: one that was there when
this frontend came to know the worker is older than its streams, and moves nothing unless it holds still.

Always true: a worker's weight is that of its record, or it waits for its first check, bounded, or it is 1; each fall is
told once at most; what cannot be read changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from holdfast.discovery.keys import CONTROLS, HEALTH, InstanceKey, parse_key
from holdfast.health.last_resort import SPARE, doubt_of
from holdfast.health.records import ControlRecord, HealthRecord
from holdfast.health.standing import FALLEN, Cause, Standing, Status
from holdfast.store.contract import Deleted, Put, Snapshot, WatchEvent

# Control hears of a worker when a frontend does, and a canary takes a second; but control may hang.
FIRST_CHECK_S = 5.0
# It wrote down that it checks: a canary and its retries are over by then (`health.breaker.CANARY_S`).
CHECKING_S = 60.0
# Where nobody else of its set serves, streams and requests are held for it meanwhile, for 30 s (`HoldSettings.hold_s`):
# it serves before they are lost, checked or not.
CHECKING_ALONE_S = 10.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker gets, of what it would."""

    weight: float = 1.0
    status: str = ""  # of its standing, for people; "": nobody judged it
    reason: str = ""  # of the status, or why it waits
    until_s: float | None = None  # it only waits: to be asked again, then at the latest
    spare: bool = False  # it gets nothing while others of its set can serve
    drains: bool = False  # its streams leave by plan
    fall: int = 0  # the last that is known
    wrong: bool = False  # it is quarantined: what it makes cannot be believed
    last_resort: bool = False  # it has weight only because too few others can serve
    doubt: int | None = None  # how much speaks against serving at all (`health.last_resort`); None: it cannot serve
    idle: bool = False  # a rollout gives it nothing

    @property
    def objection(self) -> str:
        """Why it gets no work; "": it gets some."""
        if self.weight > 0.0:
            return "kept as a spare" if self.spare else ""
        return f"{self.status.lower()}: {self.reason}" if self.status else self.reason


def idle(share: Share, by: str) -> Share:
    """What a worker gets that a rollout or a fleet replaces, or keeps in reserve, whatever its verdict: nothing more,
    and its streams leave by plan."""
    return replace(share, weight=0.0, status="IDLE", reason=f"the {by} gives it no work", drains=True, idle=True)


@dataclass(frozen=True, slots=True)
class Heard:
    """Something is known of a worker (None: of all), and, where it fell, why its streams must leave now."""

    key: InstanceKey | None
    fell: str = ""


class Standings:
    """The verdicts of the deployments that a frontend serves. `awaits`: prefixes of the store that will be told, and
    have not been yet."""

    def __init__(self, *deployments: str, awaits: Iterable[str] = ()) -> None:
        self._deployments = frozenset(deployments)
        self._awaits = set(awaits)
        self._records: dict[InstanceKey, HealthRecord] = {}
        self._leading: set[str] = set()  # keys of controls that lead

    def is_led(self, deployment: str) -> bool:
        """Whether some control leads there, as far as was told."""
        return any(key.startswith(f"{CONTROLS}{deployment}/") for key in self._leading)

    def hear(self, prefix: str, event: WatchEvent) -> list[Heard]:
        """What the store says under `prefix`, HEALTH or some of CONTROLS: of whom something is known now."""
        match event:
            case Snapshot():
                leading = {key for key in self._leading if key.startswith(prefix)}
                known = leading if prefix.startswith(CONTROLS) else self._lifted()
                heard = [one for key in known - event.items.keys() for one in self._delete(prefix, key)]
                heard += [one for key, value in event.items.items() for one in self._put(prefix, key, value)]
                first = prefix in self._awaits
                self._awaits.discard(prefix)
                return [*heard, Heard(None)] if first else heard
            case Put():
                return self._put(prefix, event.key, event.value)
            case Deleted():
                return self._delete(prefix, event.key)
            case _:
                return []  # lost: as last decided

    def share(
        self, key: InstanceKey, *, trusted: bool, since_s: float, now_s: float, alone: bool = False
    ) -> Share:
        """What a worker gets that has been known since then; `trusted`: an engine of a group, or one that serves;
        `alone`: no other of its set does."""
        record = self._records.get(key)
        if record is None:
            if not self._awaits and (trusted or not self.is_led(key.deployment)):
                return Share()
            why = "its verdict is not known yet" if self._awaits else "it waits for its first check"
            return _wait(Share(), why, since_s + FIRST_CHECK_S, now_s)
        standing = record.standing
        told = Share(
            record.standing.weight,
            Status(standing.status).name,
            standing.reason,
            spare=record.spare,
            drains=standing.status == Status.DRAINING,
            fall=standing.fall,
            wrong=standing.quarantined,
            last_resort=record.last_resort,
            doubt=SPARE if record.spare and standing.weight else doubt_of(standing.causes, standing.heard_s),
        )
        if set(standing.causes) != {Cause.UNCHECKED} or standing.fall or standing.owed:
            return told
        checking_s = CHECKING_ALONE_S if alone else CHECKING_S
        bound_s = 0.0 if trusted else checking_s if self.is_led(key.deployment) else FIRST_CHECK_S
        return _wait(replace(told, weight=1.0), told.reason, since_s + bound_s, now_s)

    # -- what is known

    def _put(self, prefix: str, key: str, value: bytes) -> list[Heard]:
        if prefix.startswith(CONTROLS):
            return self._leads(key, leads=_read(_controls, value, _FOLLOWER).leads)
        where = parse_key(HEALTH, key)
        record = _read(_verdicts, value, None)
        if where is None or record is None or where.deployment not in self._deployments:
            return []
        before = self._records.get(where)
        self._records[where] = record
        if record == before:
            return []
        return [Heard(where, record.standing.reason if self._is_news(before, record) else "")]

    def _is_news(self, before: HealthRecord | None, record: HealthRecord) -> bool:
        """Whether its streams here are to leave for a fall."""
        standing = record.standing
        if before is None:  # whatever it has here, it got before its verdict was known, or after that was forgotten
            return standing.fall > 0 and standing.status in FALLEN
        return standing.fall > before.standing.fall

    def _lifted(self) -> set[str]:
        """Keys of records that a store may forget. Not of a living worker that was to have no traffic: a store that
        lost what was written says nothing of it; control writes it again, or removes it."""
        return {HEALTH + key.path for key, record in self._records.items() if not _is_out(record.standing)}

    def _delete(self, prefix: str, key: str) -> list[Heard]:
        if prefix.startswith(CONTROLS):
            return self._leads(key, leads=False)
        where = parse_key(HEALTH, key)
        known = where is not None and self._records.pop(where, None) is not None
        return [Heard(where)] if known else []

    def _leads(self, key: str, *, leads: bool) -> list[Heard]:
        deployment = key.removeprefix(CONTROLS).partition("/")[0]
        before = self.is_led(deployment)
        (self._leading.add if leads else self._leading.discard)(key)
        return [Heard(None)] if self.is_led(deployment) is not before else []


def _is_out(standing: Standing) -> bool:
    return (standing.weight == 0.0 or standing.last_resort) and standing.status != Status.DEAD


def _wait(then: Share, why: str, until_s: float, now_s: float) -> Share:
    return then if now_s >= until_s else replace(then, weight=0.0, reason=why, until_s=until_s)


_verdicts = msgspec.json.Decoder(HealthRecord)
_controls = msgspec.json.Decoder(ControlRecord)
_FOLLOWER = ControlRecord(name="", leads=False)

Read = TypeVar("Read")
Otherwise = TypeVar("Otherwise")


def _read(decoder: msgspec.json.Decoder[Read], value: bytes, otherwise: Otherwise) -> Read | Otherwise:
    """A newer version may write what this one cannot read; and whoever reads it must not end by it."""
    try:
        return decoder.decode(value)
    except (ValueError, RecursionError):
        return otherwise
