"""Records of a deployment's rollouts in the store: desired state, the rollout's state, history, and status.

A command writes the desired state; the supervisor that carries it out writes the rollout's state and its status, and
keeps the history. An undo asks for an earlier manifest under a new number, and is then a revision like every other.

Always true: the desired state is changed only from what was read, so that of two commands at once the second sees what
the first asked for; each write has the next serial, so that no two are alike; a revision's number is never used for
other sets. How many replicas there are is no part of a revision: it is the manifest's number, or what `holdfast scale`
said since, and an undo of a revision leaves it as it is. A deployment that is being deleted takes no change. One
process writes the rollout's state: a supervisor that finds another's where its own should be carries out nothing more.
The result of a revision is derived from the rollout's state, again and again, so that a missed observation costs
nothing; a revision that was in place stays marked as that; what is in place, in progress or desired is never forgotten.
A status is of the desired state whose serial it names, and it is leased: without it no supervisor carries the
deployment out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from holdfast.core.enums import OpenStrEnum
from holdfast.core.errors import UserError
from holdfast.discovery.keys import (
    DEPLOYMENTS,
    EXPECTED,
    FAULTS,
    HEALTH,
    HISTORY,
    LEVELS,
    REFUSALS,
    ROLLOUT_STATUS,
    ROLLOUTS,
    TRAFFIC,
    parse_key,
)
from holdfast.health.bounds import Count, Seconds, UnixS
from holdfast.rollout import machine
from holdfast.rollout.machine import RolloutPhase, RolloutState
from holdfast.rollout.revision import Revision, revision_of
from holdfast.rollout.status import RolloutReport
from holdfast.rollout.traffic import encode_traffic
from holdfast.spec.manifest.addresses import NO_DIGESTS
from holdfast.spec.manifest.types import Manifest
from holdfast.store.contract import VALUE_BYTES_MAX, Snapshot, Store, StoreUnavailable, update_record

# -- revisions and their results


KEPT = 10  # revisions, as a cluster keeps


class RevisionResult(OpenStrEnum):
    """What became of a revision."""

    ROLLING = "rolling out"
    IN_PLACE = "in place"
    UNDONE = "undone"
    SUPERSEDED = "superseded"  # by a newer one, before it was in place


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """One revision, as it is kept."""

    number: Count
    manifest: str
    digest: str  # of what it asks for: two that ask for the same have the same
    at_unix_s: UnixS
    cause: str = "apply"
    result: RevisionResult = field(default=RevisionResult.ROLLING, name="fate")
    why: str = ""  # it was undone
    took_s: Seconds | None = None  # until it was in place
    secret_digests: dict[str, str] = {}  # hashes of the values of secrets, by reference
    sets: str = ""  # hash of its sets (`Revision.sets_digest`); "": an older version wrote it

    @property
    def identity(self) -> str:
        """Return a hash that two entries share if they have the same sets."""
        return self.sets or self.digest


def updated_entries(entries: Sequence[HistoryEntry], state: RolloutState) -> list[HistoryEntry]:
    """Return the entries that the rollout's state changes, as they should be written."""
    return [after for entry in entries if (after := _updated(entry, state)) != entry]


def _updated(entry: HistoryEntry, state: RolloutState) -> HistoryEntry:
    stable = state.stable.number if state.stable is not None else 0
    if entry.number == state.undone:
        return structs.replace(entry, result=RevisionResult.UNDONE, why=entry.why or state.why)
    if entry.number == stable:
        own = state.ended_s is not None and not state.undone and entry.took_s is None
        took_s = state.ended_s - state.began_s if own and state.ended_s is not None else entry.took_s
        return structs.replace(entry, result=RevisionResult.IN_PLACE, took_s=took_s)
    if entry.result is RevisionResult.ROLLING and entry.number < state.desired_number:
        return structs.replace(entry, result=RevisionResult.SUPERSEDED)
    return entry


def surplus(entries: Sequence[HistoryEntry], state: RolloutState) -> list[int]:
    """Return the numbers of entries that need not be kept."""
    stable = state.stable.number if state.stable is not None else 0
    needed = {stable, state.target.number, state.desired_number}
    oldest_first = sorted(entry.number for entry in entries)
    return [number for number in oldest_first[: max(0, len(entries) - KEPT)] if number not in needed]


def undo_target(entries: Sequence[HistoryEntry], state: RolloutState, to: int = 0) -> HistoryEntry:
    """Return the revision that an undo asks for again: what was in place before the last change, or `to`. UserError
    says why there is none, and which could be named."""
    kept = {entry.number: entry for entry in sorted(entries, key=lambda one: one.number)}
    asked = kept[state.desired_number].identity if state.desired_number in kept and not state.undone else ""
    others = [entry for entry in kept.values() if entry.identity != asked and entry.number != state.undone]
    named = f"name one with --to-revision ({', '.join(str(entry.number) for entry in others)})" if others else ""
    if to:
        if to not in kept:
            raise UserError(f"revision {to} is not kept; there are {', '.join(map(str, kept)) or 'none'}")
        back = kept[to]
    elif state.undone:
        already = f"revision {state.undone} is undone already ({state.why}), and {state.target.number} in its place"
        raise UserError(f"{already}; to go further back, {named}" if named else already)
    elif state.phase is not RolloutPhase.STEADY and state.stable is not None and state.stable.number in kept:
        back = kept[state.stable.number]
    else:
        before = [one for one in others if one.number < state.desired_number and one.result is RevisionResult.IN_PLACE]
        if not before:
            none = "there is no earlier revision that was in place"
            raise UserError(f"{none}; {named}" if named else none)
        back = before[-1]
    if back.identity == asked:
        same = f"revision {back.number} is what revision {state.desired_number} asks for already"
        raise UserError(f"{same}; {named}" if named else same)
    return back


def history_lines(entries: Sequence[HistoryEntry]) -> list[str]:
    """Return a line for each revision, oldest first."""
    lines = []
    for entry in sorted(entries, key=lambda one: one.number):
        why = f": {entry.why}" if entry.why else ""
        took = f", after {entry.took_s:.1f} s" if entry.took_s is not None else ""
        lines.append(f"{entry.number}  {entry.cause}  {entry.result}{took}{why}")
    return lines


# -- desired state


TIMEOUT_S = 10.0  # of one call: a store that restarts is back in a second or two
AGAIN = "`holdfast up -f FILE` starts it again"
UNSURE_MAX = 16  # writes without an answer, of 10 s each: of older ones none can be under way any more


class ChangeKind(StrEnum):
    """What a change was about; an undo takes each back in its own way."""

    REVISION = "revision"  # other sets: replicas are replaced
    COUNTS = "counts"  # only other numbers of replicas
    RULES = "rules"  # only how replicas are replaced


class LastChange(Struct, frozen=True, kw_only=True):
    """The last change of a desired state, which an undo takes back."""

    kind: str  # a `ChangeKind`, or one of a newer version
    cause: str  # the command
    before: dict[str, Count] = {}  # replicas of each service whose number it changed
    after: dict[str, Count] = {}


class AskedManifest(Struct, frozen=True, kw_only=True):
    """What a manifest asks for, as it is recorded."""

    text: str
    digest: str  # of all that it asks for (`Revision.digest`)
    sets: str  # of its sets alone (`Revision.sets_digest`)
    counts: dict[str, int] = {}  # replicas, by service
    secret_digests: dict[str, str] = {}

    @classmethod
    def of(cls, text: str, manifest: Manifest, secret_digests: Mapping[str, str] = NO_DIGESTS) -> AskedManifest:
        """Return what a manifest asks for; `secret_digests`: of the values of its secrets."""
        revision = revision_of(manifest, 1, secret_digests)
        return cls(
            text=text,
            digest=revision.digest,
            sets=revision.sets_digest,
            counts={name: part.replicas for name, part in revision.parts.items()},
            secret_digests=dict(secret_digests),
        )


class DesiredDeployment(Struct, frozen=True, kw_only=True):
    """What should run of a deployment, as the last command asked for it."""

    revision: Count
    manifest: str
    digest: str  # of all that it asks for (`Revision.digest`)
    serial: Count = 1
    paused: bool = False  # by a person's word, whatever the manifest says
    deleted: bool = False  # it should be gone, and then this record as well
    cause: str = "apply"
    at_unix_s: UnixS = 0.0
    secret_digests: dict[str, str] = {}  # hashes of the values of secrets, by reference (`spec.manifest.secrets`)
    sets: str = ""  # hash of its sets; "": an older version wrote it
    counts: dict[str, Count] = {}  # replicas of each service, by the manifest
    scaled: dict[str, Count] = {}  # and by `holdfast scale`, which holds until a manifest has another number
    change: LastChange | None = None

    @property
    def replicas(self) -> dict[str, int]:
        """Return how many replicas of each service there should be."""
        return self.counts | self.scaled

    def entry(self) -> HistoryEntry:
        """Return its history entry, as long as nothing came of it."""
        return HistoryEntry(
            number=self.revision,
            manifest=self.manifest,
            digest=self.digest,
            at_unix_s=self.at_unix_s,
            cause=self.cause,
            secret_digests=self.secret_digests,
            sets=self.sets,
        )


Change = Callable[[DesiredDeployment | None], DesiredDeployment]


# -- what is asked for, from what was wanted before; all of it is pure


def applied(
    asked: AskedManifest, at_unix_s: float, *, cause: str = "apply", undone: int = 0, keep_counts: bool = False
) -> Change:
    """Ask for this manifest. One with the same sets keeps the revision's number, unless that was undone (`undone`: the
    number of the undone one): a person who asks for it again wants it tried again. A number that `scale` set holds as
    long as manifests have the same number of that service; `keep_counts`: in any case. UserError, if the deployment is
    being deleted: what was accepted then would be lost with it."""
    said: dict[str, Any] = {"manifest": asked.text, "digest": asked.digest, "sets": asked.sets}
    said |= {"counts": asked.counts, "secret_digests": asked.secret_digests}

    def change(before: DesiredDeployment | None) -> DesiredDeployment:
        if before is None:
            return DesiredDeployment(revision=1, cause=cause, at_unix_s=at_unix_s, **said)
        if before.deleted:
            raise UserError(f"it is being deleted, and that goes on; once it is gone, {AGAIN}")
        is_same = before.sets == asked.sets if before.sets else before.digest == asked.digest
        is_next = not is_same or before.revision == undone
        told = {"revision": before.revision + 1, "cause": cause, "at_unix_s": at_unix_s} if is_next else {}
        scaled = _scaled(before, asked.counts, keep_counts=keep_counts)
        return _noted(before, structs.replace(before, **said, **told, scaled=scaled), cause)

    return change


def _scaled(before: DesiredDeployment, counts: Mapping[str, int], *, keep_counts: bool) -> dict[str, int]:
    """Return the numbers of replicas that hold beside those of a next manifest."""
    if keep_counts:
        return {name: now for name, now in before.replicas.items() if counts.get(name, now) != now}
    return {name: now for name, now in before.scaled.items() if counts.get(name) == before.counts[name]}


def _noted(before: DesiredDeployment, after: DesiredDeployment, cause: str) -> DesiredDeployment:
    """Return the next desired state with the change that made it; if nothing was changed, with the one before."""
    names = [name for name, now in after.replicas.items() if before.replicas.get(name, now) != now]
    if after.revision != before.revision:
        kind = ChangeKind.REVISION
    elif names:
        kind = ChangeKind.COUNTS
    elif after.digest != before.digest:
        kind = ChangeKind.RULES
    else:
        return after
    was, is_now = ({name: one.replicas[name] for name in names} for one in (before, after))
    return structs.replace(after, change=LastChange(kind=kind, cause=cause, before=was, after=is_now))


def scaled_to(name: str, replicas: Mapping[str, int], counts: Mapping[str, int], cause: str = "scale") -> Change:
    """Return a change of the number of replicas of some services. `counts`: by the manifest, of all."""

    def change(before: DesiredDeployment | None) -> DesiredDeployment:
        there = _there(name, before)
        if there.deleted:
            raise UserError(f"{name} is being deleted")
        if unknown := sorted(replicas.keys() - counts.keys()):
            raise UserError(f"{name} has no service {unknown[0]!r} any more; it has {', '.join(sorted(counts))}")
        wanted = {**there.scaled, **replicas}
        there = structs.replace(there, counts=dict(counts))
        scaled = {service: now for service, now in wanted.items() if counts.get(service, now) != now}
        return _noted(there, structs.replace(there, scaled=scaled), cause)

    return change


def of_kept(name: str, change: Change) -> Change:
    """Make the change to a deployment that is there; UserError, if it is gone, for then nothing would carry it out."""

    def checked(before: DesiredDeployment | None) -> DesiredDeployment:
        if before is None:
            raise UserError(f"{name} was deleted meanwhile; {AGAIN}")
        return change(before)

    return checked


def resumed(change: Change) -> Change:
    """Make the change and end a pause, which would keep it from taking effect."""
    return lambda before: structs.replace(change(before), paused=False)


def paused(name: str, *, on: bool) -> Change:
    """Return a change that pauses it, or lets it continue."""

    def change(before: DesiredDeployment | None) -> DesiredDeployment:
        return structs.replace(_there(name, before), paused=on)

    return change


def deleted(name: str, at_unix_s: float) -> Change:
    """Return a change to no replicas; those that are there leave by the manifest's bounds."""

    def change(before: DesiredDeployment | None) -> DesiredDeployment:
        there = _there(name, before)
        if there.deleted:
            return there
        said = {"revision": there.revision + 1, "cause": "delete", "at_unix_s": at_unix_s}
        return structs.replace(there, **said, deleted=True, paused=False)

    return change


def _there(name: str, before: DesiredDeployment | None) -> DesiredDeployment:
    if before is None:
        raise UserError(f"there is no deployment {name!r}")
    return before


# -- in the store


async def read_desired(store: Store, name: str) -> DesiredDeployment | None:
    """Return the desired state; None: there is none. UserError, if it cannot be read."""
    held = await store.get(DEPLOYMENTS + name, TIMEOUT_S)
    return None if held is None else decode_desired(name, held)


def decode_desired(name: str, data: bytes) -> DesiredDeployment:
    """Return the desired state. UserError, if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=DesiredDeployment)
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"the store's {DEPLOYMENTS}{name} cannot be read: {error}") from error


async def change_desired(store: Store, name: str, change: Change) -> DesiredDeployment:
    """Change the desired state from what it is at this moment, and return it. It is added to the history as well,
    except a deletion, with which the history goes."""
    key = DEPLOYMENTS + name

    def next_serial(held: bytes | None) -> bytes | None:
        before = None if held is None else decode_desired(name, held)
        after = change(before)
        if after == before:
            return held
        return _encoded(structs.replace(after, serial=before.serial + 1 if before is not None else 1))

    value, written = await update_record(store, key, next_serial, TIMEOUT_S)
    assert value is not None
    after = decode_desired(name, value)
    if written and not after.deleted:
        await add_to_history(store, name, after)
    return after


async def add_to_history(store: Store, name: str, asked: DesiredDeployment) -> None:
    """Add the revision to the history; if it is there already, with its result, nothing changes."""
    await store.swap(history_key(name, asked.revision), _encoded(asked.entry()), None, TIMEOUT_S)


async def write_entry(store: Store, name: str, entry: HistoryEntry) -> None:
    """Write what became of a revision."""
    await store.put(history_key(name, entry.number), _encoded(entry), TIMEOUT_S)


async def forget(store: Store, name: str) -> None:
    """Remove every key of a deployment that was deleted and has no process left. What is wanted goes last: as long as
    it stands there, a supervisor that goes on after this process sees that there is something left to do."""
    found = [key for prefix in (HEALTH, REFUSALS) for key in await _under(store, prefix) if _owner(prefix, key) == name]
    for prefix in (f"{HISTORY}{name}/", f"{EXPECTED}{name}/", f"{FAULTS}{name}/"):
        found += await _under(store, prefix)
    for key in (*found, LEVELS + name, TRAFFIC + name, ROLLOUTS + name, DEPLOYMENTS + name):
        await store.delete(key, TIMEOUT_S)


def _owner(prefix: str, key: str) -> str:
    where = parse_key(prefix, key)
    return where.deployment if where is not None else ""


async def _under(store: Store, prefix: str) -> list[str]:
    """Return all keys under a prefix, as they are now. StoreUnavailable, if the store does not say in time."""
    watch = store.watch(prefix)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for event in watch:
                if isinstance(event, Snapshot):
                    return list(event.items)
    except TimeoutError:
        pass
    finally:
        await watch.aclose()
    raise StoreUnavailable(repr(store), f"no answer within {TIMEOUT_S:g} s", f"keys under {prefix} are still there")


def history_key(name: str, number: int) -> str:
    return f"{HISTORY}{name}/{number:010d}"  # in the order of their numbers


def read_entry(key: str, value: bytes) -> HistoryEntry | None:
    """Return the entry; None: it is invalid, and others count all the same."""
    try:
        return msgspec.json.decode(value, type=HistoryEntry)
    except (msgspec.DecodeError, ValueError):
        return None


class OwnedElsewhere(Exception):
    """Another supervisor carries this deployment's rollouts out."""


class OwnedRecord:
    """A key of the store that one process writes, by swap from what it read or wrote last."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self.key = key
        self.held: bytes | None = None
        self._sure: bytes | None = None  # on the store's disk, or read as we began: one that dies may fall back to it
        self._unsure: deque[bytes] = deque(maxlen=UNSURE_MAX)  # sent since, and perhaps there

    async def open(self) -> bytes | None:
        self.held = self._sure = await self._store.get(self.key, TIMEOUT_S)
        return self.held

    async def write(self, value: bytes) -> None:
        """Return when it is on disk. OwnedElsewhere, if another wrote meanwhile; StoreUnavailable: it may be written
        yet, and is to be tried again."""
        if value == self.held and not self._unsure:
            return
        self._unsure.append(value)
        while not await self._store.swap(self.key, value, self.held, TIMEOUT_S):
            found = await self._store.get(self.key, TIMEOUT_S)
            if found == self.held or (found != self._sure and (found is None or found not in self._unsure)):
                raise OwnedElsewhere(f"{self.key} was written by another")
            self.held = found  # our own, of which no answer came, or which the store lost before it was on its disk
        self.held = self._sure = value
        self._unsure.clear()


class StateWriter:
    """Writes the state of one deployment's rollouts, and what frontends route by, for the supervisor that carries them
    out."""

    def __init__(self, store: Store, name: str) -> None:
        self._name = name
        self._state, self._traffic = OwnedRecord(store, ROLLOUTS + name), OwnedRecord(store, TRAFFIC + name)

    async def open(self, now_s: float) -> RolloutState:
        """Return the state that was written last, to continue from. UserError, if another version wrote it: everything
        stays as it is."""
        held = await self._state.open()
        await self._traffic.open()
        if held is None:
            return machine.NOTHING
        try:
            return machine.restore(machine.decode(held), now_s)
        except (msgspec.DecodeError, ValueError) as error:
            raise UserError(f"the store's {self._state.key} cannot be read: {error}") from error

    async def write(self, state: RolloutState) -> None:
        """Return when both records are on disk; raise as `OwnedRecord.write`. The state goes first, since its swap
        tells whether another supervisor took over. A process that dies between the two has carried out nothing yet; the
        next one writes the traffic record even if the state is the same."""
        value = machine.encode(state)
        await self._state.write(value)
        await self._traffic.write(encode_traffic(self._name, state, value))


def _encoded(record: DesiredDeployment | HistoryEntry) -> bytes:
    data = msgspec.json.encode(record)
    if len(data) > VALUE_BYTES_MAX:
        raise UserError(f"the manifest is too long for the store: {len(data)} of {VALUE_BYTES_MAX} bytes")
    return data


# -- the desired revision, beside the rollout's state


def desired_revision(wanted: DesiredDeployment, manifest: Manifest) -> Revision:
    """Return the desired revision, by its manifest and by commands. A deletion waits for no stream's end except within
    a drain."""
    desired = revision_of(manifest, wanted.revision, wanted.secret_digests, wanted.scaled)
    parts = dict(desired.parts)
    for name, part in desired.parts.items():
        if wanted.deleted:
            parts[name] = structs.replace(part, replicas=0, paused=False, last_drain_s=part.drain_s)
        elif wanted.paused:
            parts[name] = structs.replace(part, paused=True)
    return structs.replace(desired, parts=parts)


def active_revision(desired: Revision, state: RolloutState) -> Revision:
    """Return the revision whose processes are started next: the desired one or, once that was undone, the one it goes
    back to."""
    return state.target if state.undone and desired.number == state.desired_number else desired


def new_sets(desired: Revision, state: RolloutState, now_s: float) -> tuple[set[tuple[str, str]], float]:
    """Return the sets that the revision brings, and since when what happens to them counts: one that was only just read
    has done nothing yet."""
    before = state.stable.sets.items() if state.stable is not None else set()
    return desired.sets.items() - before, state.began_s if desired.number <= state.desired_number else now_s


def is_gone(wanted: DesiredDeployment, state: RolloutState) -> bool:
    """Return whether a deployment that was deleted has nothing left here."""
    known = state.desired_number == wanted.revision
    return wanted.deleted and known and state.phase is RolloutPhase.STEADY and not state.replicas


# -- status


class RolloutStatus(Struct, frozen=True, kw_only=True):
    """The status that a supervisor publishes while it carries a deployment's rollouts out."""

    pid: int
    host: str
    state_dir: str
    serial: int = 0  # of the desired state that it works towards (`DesiredDeployment.serial`)
    report: RolloutReport | None = None  # None: it has not looked yet
    trouble: str = ""  # why nothing is done

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, in {self.state_dir}"

    def is_at(self, place: RolloutStatus) -> bool:
        """Return whether both are of one machine and one state directory, where a lock allows only one."""
        return (self.host, self.state_dir) == (place.host, place.state_dir)


def encode_status(status: RolloutStatus) -> bytes:
    return msgspec.json.encode(status)


def decode_status(data: bytes | None) -> RolloutStatus | None:
    """Return the status; None: no supervisor carries it out, or its status cannot be read."""
    try:
        return msgspec.json.decode(data, type=RolloutStatus) if data is not None else None
    except (msgspec.DecodeError, ValueError):
        return None


async def read_status(store: Store, name: str) -> RolloutStatus | None:
    return decode_status(await store.get(ROLLOUT_STATUS + name, TIMEOUT_S))
