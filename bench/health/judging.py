"""What became of a fault: verdicts and answers, judged. Pure.

Always true: a verdict counts as found if it is the one that is expected, on the worker that was hit, after it was; any
other that takes traffic from anybody is a false one. An answer is lost if it did not come to a good end, and wrong if
it did and differs from the same request's unbroken one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.health.faults import MAY_MISS, WORST, Fault, Then
from holdfast.health import breaker
from holdfast.health.standing import URGENCY, HealthCause, HealthStatus
from holdfast.testing.answers import Answer, difference
from tests.rigs.health.verdicts import Verdict

LOGPROB_SLACK = 1e-6  # what their way through JSON may cost


def meets(then: Then, verdict: Verdict) -> bool:
    """Whether the verdict is the one that is expected."""
    standing = verdict.record.standing
    match then:
        case Then.DEAD:
            return standing.status == HealthStatus.DEAD
        case Then.LOST:
            return standing.status == HealthStatus.UNHEALTHY and HealthCause.LOST in standing.causes
        case Then.HALF:
            return standing.weight == 0.5
        case Then.DRAINED:
            return standing.status == HealthStatus.DRAINING and HealthCause.CRAWLING in standing.causes
        case Then.QUARANTINED:
            return standing.quarantined
        case Then.BREAKER:
            return verdict.record.breaker.state == breaker.BreakerState.OPEN
        case Then.NOTHING:
            return False


def alarms(history: Iterable[Verdict], hit: Mapping[str, HealthStatus]) -> list[str]:
    """Return verdicts that nothing justifies, each once. `hit`: the workers that were, and how urgent theirs may be."""
    found: dict[tuple[str, str], str] = {}
    for verdict in history:
        allowed = hit.get(verdict.name, HealthStatus.HEALTHY)
        if not verdict.unchecked and URGENCY.index(verdict.status) > URGENCY.index(allowed):
            found.setdefault((verdict.path, str(verdict)), str(verdict))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Answers:
    """What clients got, of one window."""

    count: int = 0
    lost: tuple[str, ...] = ()  # why
    wrong: int = 0
    moved: int = 0  # streams that went on elsewhere,
    moved_twice: int = 0  # and those that did so more than once


def judge_answers(pairs: Iterable[tuple[Answer, Answer]]) -> Answers:
    """Of what was expected and what came."""
    judged = [(difference(expected, answer) or _drift(expected, answer), answer) for expected, answer in pairs]
    return Answers(
        len(judged),
        tuple(answer.wrong for _, answer in judged if answer.wrong),
        sum(bool(why) and not answer.wrong for why, answer in judged),
        sum(answer.resumed > 0 for _, answer in judged),
        sum(answer.resumed > 1 for _, answer in judged),
    )


def _drift(expected: Answer, answer: Answer) -> str:
    pairs = zip(expected.logprobs, answer.logprobs, strict=False)
    same = len(expected.logprobs) == len(answer.logprobs) and all(abs(a - b) <= LOGPROB_SLACK for a, b in pairs)
    return "" if same else "other logprobs"


@dataclass(frozen=True, slots=True)
class Hit:
    """One fault that was done to something."""

    fault: Fault
    names: tuple[str, ...]  # of the workers
    at_s: float

    def found(self, history: Iterable[Verdict]) -> Verdict | None:
        """The verdict that is expected of it."""
        then = self.fault.then
        mine = (verdict for verdict in history if verdict.name in self.names and verdict.at_s >= self.at_s)
        return next((verdict for verdict in mine if meets(then, verdict)), None)


@dataclass(frozen=True, slots=True)
class Window:
    """One fault, or two at once, from the first hit until all was well again."""

    hits: tuple[Hit, ...]
    history: Sequence[Verdict]
    answers: Answers
    falls_before: Mapping[str, int] = field(default_factory=dict)  # by path
    ended: frozenset[str] = frozenset()  # workers whose process had ended before the fault was undone
    recovered_s: float | None = None  # None: not within the time; then some were restarted
    restarted: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> dict[str, HealthStatus]:
        """By worker that was hit: the most urgent that it may be called."""
        worst = dict.fromkeys(self.restarted, HealthStatus.DEAD)
        for hit in self.hits:
            for name in hit.names:
                worst[name] = max(worst.get(name, HealthStatus.HEALTHY), WORST[hit.fault.then], key=URGENCY.index)
        return worst

    def falls(self, names: Iterable[str]) -> int:
        """How often it was said that the streams of these must be moved."""
        wanted = set(names)
        said = {(v.path, v.record.standing.fall) for v in self.history if v.name in wanted}
        return sum(fall > self.falls_before.get(path, 0) for path, fall in said)


def rows(window: Window) -> list[dict[str, Any]]:
    """What is said of each of its faults."""
    false = alarms(window.history, window.worst)
    return [_row(window, hit, false) for hit in window.hits]


def _row(window: Window, hit: Hit, false: list[str]) -> dict[str, Any]:
    verdict = hit.found(window.history)
    others = [other.fault.name for other in window.hits if other is not hit]
    missed = _missed(window, hit, verdict, others)
    answers = window.answers
    return {
        "fault": hit.fault.name,
        **({"beside": others[0]} if others else {}),
        "worker": ", ".join(hit.names),
        "detect_ms": round((verdict.at_s - hit.at_s) * 1000, 1) if verdict else None,
        "action": _action(window, hit, verdict),
        "expected": str(hit.fault.then),
        "missed": [*missed, *(f"false: {text}" for text in false)],
        "streams_lost": len(answers.lost),
        "streams_moved": answers.moved,
        "answers": answers.count,
        "wrong_answers": answers.wrong,
        "false_positives": len(false),
        "recovered_s": None if window.recovered_s is None else round(window.recovered_s, 1),
        **window.more,
    }


def _action(window: Window, hit: Hit, verdict: Verdict | None) -> str:
    if verdict is not None:
        return f"{hit.fault.then} ({verdict.record.standing.reason})"
    seen = [each for each in window.history if not each.sound and not each.unchecked and each.name in hit.names]
    return str(seen[0]) if seen and len(window.hits) == 1 else "nothing"


def _missed(window: Window, hit: Hit, verdict: Verdict | None, others: list[str]) -> list[str]:
    """What is not as it must be, beside false verdicts."""
    missed: list[str] = []
    fault, answers, alone = hit.fault, window.answers, not others
    may = any((fault.name, other) in MAY_MISS for other in others)
    if fault.then is not Then.NOTHING and verdict is None and not may:
        missed.append(f"not found within {fault.within_s:g} s")
    if fault.then is Then.LOST and verdict is not None:
        if (falls := window.falls(hit.names)) != 1:
            missed.append(f"its streams were to be moved once; that was said {falls} times")
        if alone and answers.moved_twice:
            missed.append(f"{answers.moved_twice} streams were moved more than once")
    killed = {name for other in window.hits if other.fault.then is Then.DEAD for name in other.names}
    if (window.ended - killed) & set(hit.names):
        missed.append("its process ended")
    if alone and answers.moved and fault.then in (Then.HALF, Then.NOTHING):
        missed.append(f"{answers.moved} streams were moved")
    if answers.lost:
        missed.append(f"{len(answers.lost)} streams lost: {min(answers.lost)}")
    if answers.wrong and not any(each.fault.wrong for each in window.hits):
        missed.append(f"{answers.wrong} answers wrong")
    if window.recovered_s is None:
        missed.append("not all well again in time")
    return missed


def table(result: Mapping[str, Any]) -> str:
    lines = [f"{'fault':<38}{'detected':>10}  {'lost':>4} {'moved':>5} {'wrong':>5}  what followed"]
    for row in result["faults"]:
        name = f"{row['fault']} + {row['beside']}" if "beside" in row else row["fault"]
        late = f"{row['detect_ms']:.0f} ms" if row["detect_ms"] is not None else "-"
        counts = f"{row['streams_lost']:>4} {row['streams_moved']:>5} {row['wrong_answers']:>5}"
        lines.append(f"{name:<38}{late:>10}  {counts}  {row['action']}")
        lines += [f"    MISSED: {text}" for text in row["missed"]]
    lines += [f"{name:<38}{result[name]}" for name in result if name != "faults"]
    return "\n".join(lines) + "\n"
