"""Which revisions there were, what became of each, and which one an undo goes back to. Pure.

An undo is nothing of its own: it asks for an earlier manifest under a new number, and goes the way of every revision.

Always true: what became of a revision is read off the rollout's memory, again and again, so that a look that is missed
costs nothing (whoever goes on after another looks first, and steps then); what was once in place is remembered as that;
a revision's manifest is the last that was asked for under its number, so that an undo brings back what there was;
what is in place, worked at or wanted is never forgotten.
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


def noted(entries: Sequence[Entry], memory: Memory, asked: Entry | None = None) -> list[Entry]:
    """The entries of which more is known, as they should be written: by the memory, and what became of them; by what is
    asked for now, and what their manifest says. With the same sets, but so many replicas, that keeps its number."""
    latest = {} if asked is None else {asked.number: asked.manifest}
    known = [structs.replace(entry, manifest=latest.get(entry.number, entry.manifest)) for entry in entries]
    return [after for entry, one in zip(entries, known, strict=True) if (after := _noted(one, memory)) != entry]


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
    """The revision that an undo asks for again; `to`: this one. UserError says why there is none."""
    kept = {entry.number: entry for entry in sorted(entries, key=lambda one: one.number)}
    wanted = kept.get(memory.wanted)
    if to:
        if to not in kept:
            raise UserError(f"revision {to} is not kept; there are {', '.join(map(str, kept)) or 'none'}")
        if wanted is not None and not memory.undone and kept[to].digest == wanted.digest:
            raise UserError(f"revision {to} is what revision {memory.wanted} asks for already")
        return kept[to]
    if memory.undone:
        already = f"revision {memory.undone} is undone already ({memory.why})"
        raise UserError(f"{already}, and {memory.target.number} in its place; name a revision to go further back")
    if memory.phase is not Phase.STEADY and memory.stable is not None and memory.stable.number in kept:
        return kept[memory.stable.number]
    for entry in reversed(kept.values()):
        differs = wanted is None or entry.digest != wanted.digest
        if entry.number < memory.wanted and entry.fate is Fate.IN_PLACE and differs:
            return entry
    raise UserError("there is no earlier revision that was in place")


def told(entries: Sequence[Entry]) -> list[str]:
    """A line for each revision, oldest first."""
    lines = []
    for entry in sorted(entries, key=lambda one: one.number):
        why = f": {entry.why}" if entry.why else ""
        took = f", after {entry.took_s:.1f} s" if entry.took_s is not None else ""
        lines.append(f"{entry.number}  {entry.cause}  {entry.fate}{took}{why}")
    return lines
