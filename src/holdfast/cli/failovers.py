"""Failovers and other incidents in words for people: who died of what, who went on, and what the streams saw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.supervise.incidents import Incident
from holdfast.supervise.standing import Group, timeline

_TAKEN = {"wrong-answer": "was quarantined", "crawling": "was drained", "device-sick": "was drained"}
_ZEROS = {
    "last token": "from its last token",
    "successor's lock": "from its successor's lock",
    "woken": "from when it was woken",
}


@dataclass(frozen=True, slots=True)
class Told:
    """One failover in words: a line, what came of it, and what happened when."""

    line: str
    facts: list[str]
    steps: list[str]


def last_failover(group: Group, incidents: Sequence[Incident]) -> Told | None:
    """How the present active came to lead: after another, or from its sleep; None if it was the first."""
    ours = [i for i in incidents if i.group == group.name and i.epoch and (i.successor or group.active is None)]
    seen, shown = ours[-1] if ours else None, group.failover
    if shown is not None and (seen is None or shown.get("from_pid") != seen.pid) and _is_newer(shown, seen):
        if shown.get("woke") is True:
            assert group.active is not None, "it told this"
            return Told(f"woke {_when(shown.get('unix_s'))}: {group.active.name} leads", [], steps(shown, 0))
        line = f"last failover {_when(shown.get('unix_s'))}: {_unseen(shown, group)}"
        return Told(line, _kv(shown), steps(shown))
    if seen is None or _began_anew(group, seen):
        return None
    timed = seen.failover or {}
    line = f"last failover {_when(seen.process_ended_s)}: {headline(seen)}"
    return Told(line, [*cost(seen), *_kv(timed)], steps(timed, seen.streams))


def headline(incident: Incident) -> str:
    """Who ended, and why."""
    if incident.verdict:
        also = f" (and {', '.join(incident.also)})" if incident.also else ""
        return f"{incident.name}{also} {_TAKEN.get(incident.verdict, 'lost its traffic')}: {incident.why}"
    part = f" ({incident.part})" if incident.part else ""
    times = f", {incident.times} times in a row" if incident.times > 1 else ""
    how = {"exited with 0": "exited by itself", "ended": "ended; how is not known"}.get(incident.why)
    how = how or f"died: {incident.why}"
    return f"{incident.name}{part} {how}{times}"


def cost(incident: Incident) -> list[str]:
    """What became of its streams, who went on, and when it was back."""
    said = [f"{incident.successor} took over"] if incident.successor else []
    if incident.streams:
        gap = f", worst gap {span(incident.gap_ms)}" if incident.gap_ms is not None else ""
        said.append(f"{_count(incident.streams, 'stream')} went on{_targets(incident.to)}{gap}")
    if incident.lost:
        said.append(f"{_count(incident.lost, 'stream')} lost")
    if incident.streams == 0 and not incident.lost:
        said.append("no stream was on it")
    if incident.replayed:
        said.append(f"{_count(incident.replayed, 'token')} replayed")
    if incident.recomputed:
        said.append(f"{_count(incident.recomputed, 'token')} computed again")
    if incident.back_after_s is not None:
        said.append(f"{incident.name} back after {span(incident.back_after_s * 1000)}")
    return said


def _targets(to: dict[str, int]) -> str:
    """Where streams went on, the worker with the most of them first."""
    most = sorted(to.items(), key=lambda one: (-one[1], one[0]))
    return " at " + ", ".join(f"{name} ({streams})" if len(most) > 1 else name for name, streams in most) if to else ""


def steps(failover: dict[str, Any], streams: int | None = None) -> list[str]:
    """What happened when, in order. Where no stream waited, the next token came whenever somebody asked."""
    told = [(words, at_ms) for words, at_ms in timeline(failover) if words != "died"]
    if streams == 0:
        told = [(words, at_ms) for words, at_ms in told if words != "first token"]
    zero = next((words for part, words in _ZEROS.items() if part in str(failover.get("zero"))), "from its end")
    spans = [f"{words} {span(at_ms)}" for words, at_ms in told]
    return [f"{zero}: {spans[0]}", *spans[1:]] if spans else []


def when(unix_s: float) -> str:
    """In this machine's time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def span(at_ms: float) -> str:
    """Milliseconds, or seconds from one on."""
    if at_ms == 0.0:
        return "0"
    return f"{at_ms:.1f} ms" if at_ms < 1000.0 else f"{at_ms / 1000.0:.2f} s"


def _began_anew(group: Group, seen: Incident) -> bool:
    """The deployment was stopped and started since."""
    active = group.active
    if active is None or group.failover is not None or active.failover is None:
        return False
    return float(active.failover.get("unix_s") or 0.0) > seen.process_ended_s and seen.successor != active.name


def _is_newer(shown: dict[str, Any], seen: Incident | None) -> bool:
    return seen is None or float(shown.get("unix_s") or 0.0) > seen.process_ended_s


def _unseen(failover: dict[str, Any], group: Group) -> str:
    """A change of leaders that no supervisor wrote down: planned, if the old one lives."""
    who, pid = str(failover.get("from_engine") or "another"), failover.get("from_pid")
    if any(member.pid == pid and member.state != "dead" for member in group.members):
        return f"{who} handed over"
    return f"{who} ended; no supervisor saw why"


def _kv(failover: dict[str, Any]) -> list[str]:
    if failover.get("why_empty"):
        return [f"no KV kept: {failover['why_empty']}"]
    blocks = failover.get("blocks")
    return [f"{_count(blocks, 'block')} of KV kept"] if isinstance(blocks, int) else []


def _when(unix_s: object) -> str:
    return when(float(unix_s)) if isinstance(unix_s, int | float) else "at a time not known"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
