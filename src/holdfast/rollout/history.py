"""Which revisions there were, what became of each, and which one an undo goes back to. Pure.

An undo is nothing of its own: it asks for an earlier manifest under a new number, and goes the way of every revision.

Always true: what became of a revision is read off the rollout's memory, again and again, so that a look that is missed
costs nothing (whoever goes on after another looks first, and steps then); what was once in place is remembered as that;
every change that asks for something else, be it another number of replicas, is a revision of its own, so that an undo
brings back what there was; what is in place, worked at or wanted is never forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct, field, structs

from holdfast.core.errors import UserError
from holdfast.health.bounds import Count, Seconds, UnixS
from holdfast.rollout.machine import RolloutPhase, RolloutState

KEPT = 10  # revisions, as a cluster keeps


class RevisionResult(StrEnum):
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


def updated_entries(entries: Sequence[HistoryEntry], state: RolloutState) -> list[HistoryEntry]:
    """The entries of which the memory knows more, as they should be written."""
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
    """The numbers of those that need not be kept."""
    stable = state.stable.number if state.stable is not None else 0
    needed = {stable, state.target.number, state.desired_number}
    oldest_first = sorted(entry.number for entry in entries)
    return [number for number in oldest_first[: max(0, len(entries) - KEPT)] if number not in needed]


def undo_target(entries: Sequence[HistoryEntry], state: RolloutState, to: int = 0) -> HistoryEntry:
    """Return the revision that an undo asks for again: what was in place before the last change, or `to`. UserError
    says why there is none, and which could be named."""
    kept = {entry.number: entry for entry in sorted(entries, key=lambda one: one.number)}
    asked = kept[state.desired_number].digest if state.desired_number in kept and not state.undone else ""
    others = [entry for entry in kept.values() if entry.digest != asked and entry.number != state.undone]
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
    if back.digest == asked:
        same = f"revision {back.number} is what revision {state.desired_number} asks for already"
        raise UserError(f"{same}; {named}" if named else same)
    return back


def history_lines(entries: Sequence[HistoryEntry]) -> list[str]:
    """A line for each revision, oldest first."""
    lines = []
    for entry in sorted(entries, key=lambda one: one.number):
        why = f": {entry.why}" if entry.why else ""
        took = f", after {entry.took_s:.1f} s" if entry.took_s is not None else ""
        lines.append(f"{entry.number}  {entry.cause}  {entry.result}{took}{why}")
    return lines
