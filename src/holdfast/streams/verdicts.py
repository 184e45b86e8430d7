"""Control's latest verdict on each worker, as this frontend read it, and the share of traffic that follows. Pure.

Theory. A verdict is a record in the store and outlives the control that wrote it: when control or the store is gone,
the last verdict holds. A worker without a verdict may have to wait a little for its first check. It does not wait if:
- no control leads in its deployment, so that none would check it;
- it is an engine of a group: it proved itself when it took over, and clients wait for it;
- it served already when the first control came.

An ejection (`health.standing`: control decides that a worker loses its streams) moves them once; its number says
whether it is new. One from before this frontend knew the worker is older than its streams here. It moves them only if
the worker has not recovered since.

Always true: a worker's weight is that of its record, or 0 during the bounded wait for its first check, or 1; each
ejection is reported at most once; a record that cannot be read changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from holdfast.discovery.keys import CONTROLS, HEALTH, InstanceKey, parse_key
from holdfast.health.last_resort import SPARE_UNFITNESS, unfitness_of
from holdfast.health.records import ControlRecord, HealthRecord
from holdfast.health.standing import EJECTED, HealthCause, HealthStatus, WorkerStanding
from holdfast.store.contract import Snapshot, WatchEvent, changes

# Control and frontends discover a worker at the same time, and a canary takes a second; but control may hang.
FIRST_CHECK_S = 5.0
# Control has recorded that it checks the worker: a canary with its retries takes less (`health.breaker.CANARY_S`).
CHECKING_S = 60.0
# The same if no other worker of the set serves. Its streams are held for 30 s only (`HoldSettings.hold_s`): the worker
# serves before they are lost, checked or not.
CHECKING_ALONE_S = 10.0


@dataclass(frozen=True, slots=True)
class TrafficShare:
    """The share of traffic that one worker gets, and why."""

    weight: float = 1.0
    status: str = ""  # control's `HealthStatus`, for people; "": no verdict
    reason: str = ""  # of the status, or why it waits
    until_s: float | None = None  # end of its wait for a check; None: it does not wait
    spare: bool = False  # it gets nothing while others of its set can serve
    drains: bool = False  # its streams are moved away a few at a time
    ejections: int = 0  # number of its last known ejection
    wrong: bool = False  # it is quarantined: its output may be wrong
    last_resort: bool = False  # it has weight only because too few others can serve
    unfitness: int | None = None  # as a last resort, lowest first (`health.last_resort`); None: it cannot serve
    idle: bool = False  # a rollout gives it nothing

    @property
    def objection(self) -> str:
        """Return why it gets no work; "" if it gets some."""
        if self.weight > 0.0:
            return "kept as a spare" if self.spare else ""
        return f"{self.status.lower()}: {self.reason}" if self.status else self.reason


def idle_share(share: TrafficShare, by: str) -> TrafficShare:
    """Return the share of a worker that a rollout or a fleet replaces or keeps in reserve: no new work, and its streams
    are moved away, whatever its verdict."""
    return replace(share, weight=0.0, status="IDLE", reason=f"the {by} gives it no work", drains=True, idle=True)


@dataclass(frozen=True, slots=True)
class VerdictChange:
    """Says that the verdict on a worker changed (key None: on all workers). `ejected_for`: why its streams must leave
    now; "" if they need not."""

    key: InstanceKey | None
    ejected_for: str = ""


class WorkerVerdicts:
    """The verdicts of the deployments that a frontend serves. `awaits`: prefixes of the store whose first snapshot has
    not arrived yet."""

    def __init__(self, *deployments: str, awaits: Iterable[str] = ()) -> None:
        self._deployments = frozenset(deployments)
        self._awaits = set(awaits)
        self._records: dict[InstanceKey, HealthRecord] = {}
        self._leading: set[str] = set()  # keys of controls that lead

    def is_led(self, deployment: str) -> bool:
        """Return whether a control leads in this deployment, according to the store."""
        return any(key.startswith(f"{CONTROLS}{deployment}/") for key in self._leading)

    def on_store_event(self, prefix: str, event: WatchEvent) -> list[VerdictChange]:
        """Apply an event of the store under `prefix` (HEALTH or part of CONTROLS); return the changed verdicts."""
        known = (key for key in self._leading if key.startswith(prefix))
        put, removed = changes(event, known if prefix.startswith(CONTROLS) else self._lifted())
        news = [one for key in removed for one in self._delete(prefix, key)]
        news += [one for key, value in put.items() for one in self._put(prefix, key, value)]
        if isinstance(event, Snapshot) and prefix in self._awaits:
            self._awaits.discard(prefix)
            news.append(VerdictChange(None))
        return news

    def share(
        self, key: InstanceKey, *, trusted: bool, since_s: float, now_s: float, alone: bool = False
    ) -> TrafficShare:
        """Return the share of a worker that is known since `since_s`. `trusted`: it is an engine of a group, or serves
        already. `alone`: no other worker of its set serves."""
        record = self._records.get(key)
        if record is None:
            if not self._awaits and (trusted or not self.is_led(key.deployment)):
                return TrafficShare()
            why = "its verdict is not known yet" if self._awaits else "it waits for its first check"
            return _wait(TrafficShare(), why, since_s + FIRST_CHECK_S, now_s)
        standing = record.standing
        share = TrafficShare(
            record.standing.weight,
            HealthStatus(standing.status).name,
            standing.reason,
            spare=record.spare,
            drains=standing.status == HealthStatus.DRAINING,
            ejections=standing.fall,
            wrong=standing.quarantined,
            last_resort=record.last_resort,
            unfitness=SPARE_UNFITNESS
            if record.spare and standing.weight
            else unfitness_of(standing.causes, standing.heard_s),
        )
        if set(standing.causes) != {HealthCause.UNCHECKED} or standing.fall or standing.owed:
            return share
        checking_s = CHECKING_ALONE_S if alone else CHECKING_S
        bound_s = 0.0 if trusted else checking_s if self.is_led(key.deployment) else FIRST_CHECK_S
        return _wait(replace(share, weight=1.0), share.reason, since_s + bound_s, now_s)

    # -- what is known

    def _put(self, prefix: str, key: str, value: bytes) -> list[VerdictChange]:
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
        return [VerdictChange(where, record.standing.reason if self._is_newly_ejected(before, record) else "")]

    def _is_newly_ejected(self, before: HealthRecord | None, record: HealthRecord) -> bool:
        """Return whether its streams on this frontend must leave because of a new ejection."""
        standing = record.standing
        if before is None:  # it got its streams while this frontend had no verdict on it
            return standing.fall > 0 and standing.status in EJECTED
        return standing.fall > before.standing.fall

    def _lifted(self) -> Iterator[str]:
        """Yield the keys of records that are dropped if the store no longer has them. Verdicts that keep a living
        worker from traffic are not among them: the store may have lost its data, and control writes them again or
        removes them."""
        return (HEALTH + key.path for key, record in self._records.items() if not _is_out(record.standing))

    def _delete(self, prefix: str, key: str) -> list[VerdictChange]:
        if prefix.startswith(CONTROLS):
            return self._leads(key, leads=False)
        where = parse_key(HEALTH, key)
        known = where is not None and self._records.pop(where, None) is not None
        return [VerdictChange(where)] if known else []

    def _leads(self, key: str, *, leads: bool) -> list[VerdictChange]:
        deployment = key.removeprefix(CONTROLS).partition("/")[0]
        before = self.is_led(deployment)
        (self._leading.add if leads else self._leading.discard)(key)
        return [VerdictChange(None)] if self.is_led(deployment) is not before else []


def _is_out(standing: WorkerStanding) -> bool:
    return (standing.weight == 0.0 or standing.last_resort) and standing.status != HealthStatus.DEAD


def _wait(then: TrafficShare, why: str, until_s: float, now_s: float) -> TrafficShare:
    return then if now_s >= until_s else replace(then, weight=0.0, reason=why, until_s=until_s)


_verdicts = msgspec.json.Decoder(HealthRecord)
_controls = msgspec.json.Decoder(ControlRecord)
_FOLLOWER = ControlRecord(name="", leads=False)

Read = TypeVar("Read")
Otherwise = TypeVar("Otherwise")


def _read(decoder: msgspec.json.Decoder[Read], value: bytes, otherwise: Otherwise) -> Read | Otherwise:
    """Decode a record, or return `otherwise`: a newer version may write what this one cannot read."""
    try:
        return decoder.decode(value)
    except (ValueError, RecursionError):
        return otherwise
