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

from msgspec import Struct, structs

from holdfast.core.errors import UserError
from holdfast.health.bounds import Count, Seconds, UnixS
from holdfast.rollout.machine import Memory, Phase

KEPT = 10  # revisions, as a cluster keeps


class Fate(StrEnum):
    """What became of a revision."""

    ROLLING = "rolling out"
    IN_PLACE = "in place"
    UNDONE = "undone"
    SUPERSEDED = "superseded"  # by a newer one, before it was in place


class Entry(Struct, frozen=True, kw_only=True):
    """One revision, as it is kept."""

    number: Count
    manifest: str
    digest: str  # of what it asks for: two that ask for the same have the same
    at_unix_s: UnixS
    cause: str = "apply"
    fate: Fate = Fate.ROLLING
    why: str = ""  # it was undone
    took_s: Seconds | None = None  # until it was in place
    secret_digests: dict[str, str] = {}  # hashes of the values of secrets, by reference


def noted(entries: Sequence[Entry], memory: Memory) -> list[Entry]:
    """The entries of which the memory knows more, as they should be written."""
    return [after for entry in entries if (after := _noted(entry, memory)) != entry]


def _noted(entry: Entry, memory: Memory) -> Entry:
    stable = memory.stable.number if memory.stable is not None else 0
    if entry.number == memory.undone:
        return structs.replace(entry, fate=Fate.UNDONE, why=entry.why or memory.why)
    if entry.number == stable:
        own = memory.ended_s is not None and not memory.undone and entry.took_s is None
        took_s = memory.ended_s - memory.began_s if own and memory.ended_s is not None else entry.took_s
        return structs.replace(entry, fate=Fate.IN_PLACE, took_s=took_s)
    if entry.fate is Fate.ROLLING and entry.number < memory.wanted:
        return structs.replace(entry, fate=Fate.SUPERSEDED)
    return entry


def surplus(entries: Sequence[Entry], memory: Memory) -> list[int]:
    """The numbers of those that need not be kept."""
    stable = memory.stable.number if memory.stable is not None else 0
    needed = {stable, memory.target.number, memory.wanted}
    oldest_first = sorted(entry.number for entry in entries)
    return [number for number in oldest_first[: max(0, len(entries) - KEPT)] if number not in needed]


def way_back(entries: Sequence[Entry], memory: Memory, to: int = 0) -> Entry:
    """Return the revision that an undo asks for again: what was in place before the last change, or `to`. UserError
    says why there is none, and which could be named."""
    kept = {entry.number: entry for entry in sorted(entries, key=lambda one: one.number)}
    asked = kept[memory.wanted].digest if memory.wanted in kept and not memory.undone else ""
    others = [entry for entry in kept.values() if entry.digest != asked and entry.number != memory.undone]
    named = f"name one with --to-revision ({', '.join(str(entry.number) for entry in others)})" if others else ""
    if to:
        if to not in kept:
            raise UserError(f"revision {to} is not kept; there are {', '.join(map(str, kept)) or 'none'}")
        back = kept[to]
    elif memory.undone:
        already = f"revision {memory.undone} is undone already ({memory.why}), and {memory.target.number} in its place"
        raise UserError(f"{already}; to go further back, {named}" if named else already)
    elif memory.phase is not Phase.STEADY and memory.stable is not None and memory.stable.number in kept:
        back = kept[memory.stable.number]
    else:
        before = [one for one in others if one.number < memory.wanted and one.fate is Fate.IN_PLACE]
        if not before:
            none = "there is no earlier revision that was in place"
            raise UserError(f"{none}; {named}" if named else none)
        back = before[-1]
    if back.digest == asked:
        same = f"revision {back.number} is what revision {memory.wanted} asks for already"
        raise UserError(f"{same}; {named}" if named else same)
    return back


def told(entries: Sequence[Entry]) -> list[str]:
    """A line for each revision, oldest first."""
    lines = []
    for entry in sorted(entries, key=lambda one: one.number):
        why = f": {entry.why}" if entry.why else ""
        took = f", after {entry.took_s:.1f} s" if entry.took_s is not None else ""
        lines.append(f"{entry.number}  {entry.cause}  {entry.fate}{took}{why}")
    return lines
