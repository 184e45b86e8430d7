"""What a process's own answers mean: a kubelet's liveness and readiness probes, as a pure count.

Theory (facts 24, 31): an answer proves something, silence does not. A process that *says* it cannot live any more
(`/live` answers, and not with 200) several times in a row is condemned; one that says nothing may only be starved, and
is judged by its beats and by the kernel (`watching`), never here. Readiness is shown and kills nobody.

Always true: silence neither adds to the count nor clears it; a process is condemned once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.spec.jobs import Probes


class Answer(StrEnum):
    YES = "yes"  # 200
    NO = "no"  # any other status
    SILENCE = "silence"


@dataclass(frozen=True, slots=True)
class Asked:
    """What one process answered so far."""

    refusals: int = 0  # of /live, in a row
    ready: Answer = Answer.SILENCE

    def __str__(self) -> str:
        readiness = {Answer.YES: "ready", Answer.NO: "not ready", Answer.SILENCE: "silent"}[self.ready]
        return f"{readiness}, /live refused {self.refusals} times" if self.refusals else readiness


def answer_of(status: int | None) -> Answer:
    """A status code, or None where nothing came, as an answer."""
    if status is None:
        return Answer.SILENCE
    return Answer.YES if status == 200 else Answer.NO


def weigh(asked: Asked, live: Answer, ready: Answer, probes: Probes, reason: str = "") -> tuple[Asked, str]:
    """What is known now, and why the process is condemned, or ""; `reason`: what its answer to /live gives as one."""
    refusals = {Answer.YES: 0, Answer.NO: asked.refusals + 1, Answer.SILENCE: asked.refusals}[live]
    after = replace(asked, refusals=refusals, ready=ready)
    if live is Answer.NO and refusals == probes.failure_threshold:
        cause = f": {reason}" if reason else f" (/live refused {refusals} times in a row)"
        return after, f"says that it cannot live{cause}"
    return after, ""
