"""`python -m bench.health`: four workers under load, broken in every way there is, one at a time or two at once.

Each fault is a window: hit, wait for the verdict, hold, undo, wait until everybody is well and every stream that was
open has ended. Answers belong to the window in which they ended. What is measured is the time from the hit to the
verdict as a watcher of the store hears of it, which is when frontends do.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from bench.health.faults import FAULTS, Fault, On, Then, Undo, pairs
from bench.health.judging import Answers, Hit, Window, judge_answers, rows
from bench.health.rig import FaultRig, breakable
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Received, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.waiting import in_thread, until
from holdfast.testing.workload import Asking, Workload

START_S = 60.0  # for everybody's first check
# A worker that fell several times must pass some canaries in a row; more than that is not coming back.
RECOVER_S = 200.0  # weights that were wrong again after a load are loaded again after a minute, and then two
STREAMS_S = 60.0  # for the streams that are open when all is well to end; they take seconds
LOOK_EVERY_S = 0.05

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HealthBench:
    """What runs, and what is done to it."""

    faults: tuple[Fault, ...] = FAULTS
    in_pairs: bool = False
    seed: int = 1
    part: tuple[int, int] = (1, 1)  # which of so many equal parts of it
    limit_s: float = math.inf  # no case is begun after that
    workers: int = 4
    streams: int = 16
    tokens: int = 60
    ttft_ms: float = 20.0
    tpot_ms: float = 20.0
    # How often each worker is asked: that decides how soon rot is found, and nothing else. Thresholds are the defaults.
    canary_interval_s: float = 5.0

    @property
    def cases(self) -> list[tuple[Fault, ...]]:
        every: list[tuple[Fault, ...]] = [(fault,) for fault in self.faults]
        if self.in_pairs:
            every = list(pairs(self.faults))
        which, parts = self.part
        return every[which - 1 :: parts]

    def deployment(self, **sim: Any) -> Deployment:
        # The share is what would make the interval longer: a canary here takes a fifth of a second.
        health = {"canary_interval_s": self.canary_interval_s, "canary_share": 1.0}
        pace = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}
        return Deployment(self.workers, {**pace, **sim}, control={"health": health})


def run(bench: HealthBench, tell: Tell = lambda text: None) -> dict[str, Any]:
    """All cases; `missed` says what is not as it must be."""
    began_s, windows, missed = time.monotonic(), list[Window](), list[str]()
    with bench.deployment() as deployment:
        try:
            uvloop.run(_run(bench, deployment, windows, tell))
        except TimeoutError as error:  # what was found until then is told all the same
            missed.append(f"after {len(windows)} of {len(bench.cases)} cases: {error}")
    judged = [rows(window) for window in windows]
    if len(windows) < len(bench.cases):
        missed.append(f"{len(bench.cases) - len(windows)} of {len(bench.cases)} cases were not tried")
    return {
        "faults": [row for each in judged for row in each],
        # The faults of a pair have one window in common.
        **{name: sum(each[0][name] for each in judged) for name in ("false_positives", "streams_lost", "answers")},
        "missed": [f"{name_of(row)}: {text}" for each in judged for row in each for text in row["missed"]] + missed,
        "cases": len(windows),
        "cases_meant": len(bench.cases),
        "workers": bench.workers,
        "streams": bench.streams,
        "canary_interval_s": bench.canary_interval_s,
        "seed": bench.seed,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def name_of(row: dict[str, Any]) -> str:
    return f"{row['fault']} + {row['beside']}" if "beside" in row else str(row["fault"])


async def _run(bench: HealthBench, deployment: Deployment, windows: list[Window], tell: Tell) -> None:
    ends_s = time.monotonic() + bench.limit_s
    async with breakable(deployment) as rig:
        tell(f"{bench.workers} workers; a canary every {bench.canary_interval_s:g} s instead of 30")
        await until(rig.is_whole, "every worker's first check", START_S, every_s=LOOK_EVERY_S)
        asking = Asking(deployment.port, Workload(bench.streams, bench.tokens, bench.seed))
        expected = [read_answer(one) for one in await asking.once()]
        campaign = Campaign(rig, asking, expected, random.Random(bench.seed), tell)
        async with asking.all_the_time(time.monotonic()):  # what is asked after the last window is of none
            for case in bench.cases:
                if time.monotonic() < ends_s:
                    windows.append(await campaign.window(case))


@dataclass(slots=True)
class Campaign:
    """Breaks one window after the other."""

    rig: FaultRig
    asking: Asking
    expected: Sequence[Answer]
    rng: random.Random
    tell: Tell

    async def window(self, faults: tuple[Fault, ...]) -> Window:
        """Break, look, mend, and wait until nothing of it is left."""
        rig, first = self.rig, len(self.rig.verdicts.history)
        falls = {path: verdict.record.standing.fall for path, verdict in rig.verdicts.now.items()}
        hits: list[Hit] = []
        # What all of them are told comes first: one that is stopped hears nothing.
        for fault, names in sorted(rig.choose(faults, self.rng), key=lambda chosen: chosen[0].on is not On.ALL):
            hits.append(Hit(fault, names, time.perf_counter()))
            await rig.inject(fault, names)
        await asyncio.gather(*(self._hold(hit, first) for hit in hits))
        ended = frozenset(name for hit in hits for name in hit.names if rig.has_ended(name))
        for hit in reversed(hits):
            await rig.undo(hit.fault, [name for name in hit.names if hit.fault.undo is Undo.START or name not in ended])
        recovered_s, restarted = await self._recovered()
        answers = await self._answers()
        history, notes = rig.verdicts.history[first:], await rig.take_notes()
        window = Window(tuple(hits), history, answers, falls, ended, recovered_s, restarted, notes)
        for row in rows(window):
            late = f" after {row['detect_ms']:.0f} ms" if row["detect_ms"] is not None else ""
            self.tell(f"{name_of(row)}: {row['action']}{late}" + "".join(f"\n  MISSED: {one}" for one in row["missed"]))
        return window

    async def _hold(self, hit: Hit, first: int) -> None:
        """Until the verdict is there, or it is too late; and then for as long as the fault is to stay."""
        if hit.fault.then is not Then.NOTHING:
            with contextlib.suppress(TimeoutError):
                await until(lambda: hit.found(self.rig.verdicts.history[first:]), "a verdict", hit.fault.within_s)
        await asyncio.sleep(hit.fault.hold_s)

    async def _recovered(self) -> tuple[float | None, tuple[str, ...]]:
        """Return the seconds until all workers were well again, or None and the workers that were not in time: they are
        restarted, so that the next fault is alone."""
        began_s = time.monotonic()
        try:
            await until(self.rig.is_whole, "all to be well", RECOVER_S, every_s=LOOK_EVERY_S)
        except TimeoutError:
            restarted = tuple(self.rig.unsound())
            for name in restarted:
                self.tell(f"  {name} is restarted: {self.rig.verdict(name)}")
                await self.rig.restart(name)
            await until(self.rig.is_whole, "all to be well after a restart", RECOVER_S, every_s=LOOK_EVERY_S)
            return None, restarted
        return time.monotonic() - began_s, ()

    async def _answers(self) -> Answers:
        """What came since the last window, once every stream that is open now has ended. One that has not is lost."""
        open_now = dict(self.asking.open)

        def left() -> int:
            return sum(self.asking.open[number] is client for number, client in open_now.items())

        hanging = 0
        try:
            await until(lambda: not left(), "streams to end", STREAMS_S, every_s=LOOK_EVERY_S)
        except TimeoutError:
            hanging = left()
        received, self.asking.received = self.asking.received, []
        judged: Answers = await in_thread(self._judged, received, hanging)
        return judged

    def _judged(self, received: list[tuple[int, Received]], hanging: int) -> Answers:
        judged = judge_answers((self.expected[number], read_answer(one)) for number, one in received)
        return replace(judged, lost=(*judged.lost, *["it did not end"] * hanging))
