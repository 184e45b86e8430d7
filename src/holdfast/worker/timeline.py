"""One takeover, step by step: when the dead leader was last heard, and what its successor did after that.

Always true: all times are the machine's monotonic clock, so those of two processes can be compared; a step that has not
happened is not there. Zero is the last token the dead leader sent, or, if it had been silent for a while, the moment
its end was seen; by one that came later, and saw neither, its own lock, which it says. One that slept when the last
leader went is woken to lead, and takes over from nobody: its zero is then. A first start has no dead leader, whatever
the journals of an earlier deployment say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.engines.contract import Woken
from holdfast.failover.journal import SILENT_S, Term, read_terms

WOKEN = "it was woken"
UNSEEN = "its successor's lock; nobody stood by to see its end"
STEPS = ("eof", "lock", "fence", "adopted", "announced", "first_token", "gpu_fence")


class Timeline:
    """Marks of one leadership, and its predecessor's last sign of life."""

    def __init__(self, journals: Path, epoch: int, unix_s: float, *, after: int, woken_s: float = 0.0) -> None:
        self._journals = journals
        self._after = after  # the epoch of who led before, in the life of this memory; 0: this is a first start
        self._woken_s = woken_s  # when it was woken, having slept; 0: it did not
        self.epoch = epoch
        self.unix_s = unix_s
        self.marks: dict[str, float] = {}
        self.woken: Woken | None = None
        self._predecessor: Term | None = None
        self._looked = False

    def mark(self, step: str, at_s: float) -> None:
        """The first time counts."""
        self.marks.setdefault(step, at_s)

    def mark_end(self, epoch: int, at_s: float) -> None:
        """A leader's end was seen then. With several standbys it may be one whose successor this one outlived."""
        if epoch and epoch == self._after:
            self.mark("eof", at_s)

    def facts(self) -> dict[str, Any]:
        """Milliseconds since zero, by step; `why`: what made it necessary, `kv`: what became of the blocks."""
        if not self.marks:
            return {}
        before = self._before()
        woke = self._woken_s > self.marks.get("eof", 0.0)  # who led before had gone by then
        marks = {step: at_s for step, at_s in self.marks.items() if step != "eof"} if woke else self.marks
        began_s = self._woken_s if woke else min(marks.values())
        heard_s = before.last_sent_ns / 1e9 if before is not None else 0.0
        zero_s = heard_s if not woke and 0.0 <= began_s - heard_s < SILENT_S else began_s
        facts: dict[str, Any] = {"epoch": self.epoch, "unix_s": self.unix_s, "woke": woke}
        facts["from_epoch"] = before.epoch if before is not None else 0
        if before is not None:
            facts |= {"from_engine": before.engine, "from_pid": before.pid}
        seen = "its end, as seen by the vault" if "eof" in self.marks else UNSEEN
        facts["zero"] = WOKEN if woke else "the last leader's last token" if zero_s == heard_s else seen
        facts["died_ms"] = 0.0
        for step in STEPS:
            if step in marks:
                facts[f"{step}_ms"] = round((marks[step] - zero_s) * 1000, 2)
        if self.woken is not None:
            facts |= {"blocks": self.woken.blocks, "why_empty": self.woken.reason}
        facts["zero_monotonic_s"] = zero_s
        return facts

    def _before(self) -> Term | None:
        """Read once, and never on a failover's path: only when somebody asks."""
        if self._after and not self._looked:
            self._looked = True
            older = [term for term in read_terms(self._journals) if term.epoch < self.epoch]
            self._predecessor = older[-1] if older else None
        return self._predecessor
