"""Judges a cell by what its streams and probes saw. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.harm.watch import Ended
from holdfast.spec.waits import HoldSettings

HOLD_S = HoldSettings().hold_s
HOLD_GRACE_S = 5.0  # on a machine that is busy
# A probe is asked every half second, takes some steps, and ends a moment later than the service is back.
PROBE_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One cell's run. `away_s`: the longest time without a good answer or, but in (d), without a token of
    a stream; in (d) from when the cause was over."""

    ended: Sequence[Ended]
    away_s: float
    load_s: float
    probes: int = 0
    probes_failed: int = 0
    alarms: tuple[str, ...] = ()
    seconds: float = 0.0


def missed(case: str, seen: Seen) -> list[str]:
    """Return the bounds that the cell missed; empty: it is met."""
    found = _unfit(seen.ended) if case == "d" else _lost(case, seen.ended)
    if seen.away_s > seen.load_s + PROBE_GRACE_S:
        found.append(f"the service was away for {seen.away_s:.1f} s; one load takes {seen.load_s:.1f} s")
    return found


def _lost(case: str, ended: Sequence[Ended]) -> list[str]:
    lost = [one for one in ended if one.lost]
    found = [f"{len(lost)} of {len(ended)} streams lost: {lost[0].lost}"] if lost else []
    wrong = sum(one.wrong and not one.lost for one in ended)
    if case in ("a", "b") and wrong:
        found.append(f"{wrong} of {len(ended)} answers wrong, and no engine computed wrongly")
    return found


def _unfit(ended: Sequence[Ended]) -> list[str]:
    """With a true alarm on the only worker an answer is right, or flagged, or fails by name in time."""
    silent = [one for one in ended if one.lost and not one.code]
    late = [one for one in ended if one.lost and one.code and one.failed_s > HOLD_S + HOLD_GRACE_S]
    unflagged = sum(one.wrong and not one.flagged and not one.lost for one in ended)
    found = [f"{len(silent)} of {len(ended)} streams ended without a name: {silent[0].lost}"] if silent else []
    found += [f"{len(late)} of {len(ended)} streams failed after {late[0].failed_s:.0f} s of silence"] if late else []
    return found + ([f"{unflagged} of {len(ended)} wrong answers were not flagged"] if unflagged else [])


def row_of(what: str, case: str, seen: Seen) -> dict[str, Any]:
    """Return one cell's figures, for the results file."""
    ended = seen.ended
    not_met = missed(case, seen)
    return {
        "what": what,
        "streams": len(ended),
        "right": sum(not one.lost and not one.wrong for one in ended),
        "lost": sum(bool(one.lost) for one in ended),
        "failed_by_name": sum(bool(one.lost and one.code) for one in ended),
        "wrong": sum(one.wrong for one in ended),
        "flagged": sum(one.flagged for one in ended),
        "worst_gap_s": round(max((one.gap_s for one in ended), default=0.0), 1),
        "away_s": round(seen.away_s, 1),
        "load_s": round(seen.load_s, 1),
        "probes": seen.probes,
        "probes_failed": seen.probes_failed,
        "alarms": list(seen.alarms),
        "seconds": round(seen.seconds, 1),
        "missed": not_met,
        "met": not not_met,
    }


def shown(cells: dict[str, dict[str, Any]], case: str) -> str:
    """A cell as the table in docs/health.md has it."""
    cell = cells.get(case)
    if cell is None:
        return "not run"
    if "absent" in cell:
        return f"none: {cell['absent']}"
    if case == "d":
        text = f"{cell['right']} right, {cell['flagged']} flagged, {cell['failed_by_name']} failed by name"
    else:
        text = f"{cell['lost']} lost"
    return f"{text}, away {cell['away_s']:g} s" + ("" if cell["met"] else " **missed**")
