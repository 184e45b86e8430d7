"""One cell, or all cells of a check: a deployment begins, streams run, the alarm is raised, their ends are judged."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.harm.cells import CASES, CHECKS, Cell
from bench.harm.judging import Seen, row_of, shown
from bench.harm.sites import Site
from bench.harm.watch import Probes, begin, end, longest_away_s

LOOK_EVERY_S = 0.5
BACK_S = 20.0  # for a probe to be answered once the streams are over, where none was since

Tell = Callable[[str], None]
BOUND = "0 lost in a, b and c; in d flagged or failed by name within the hold; never away for longer than one load"


def check(name: str, tell: Tell, cases: Iterable[str] = CASES) -> dict[str, Any]:
    """Return the row of one check: each of its cells, and what was missed."""
    cells = {case: one(name, case, tell) for case in cases}
    not_met = [f"{case}: {text}" for case, cell in cells.items() for text in cell.get("missed", [])]
    row = {case: shown(cells, case) for case in cells}
    return row | {"cells": cells, "missed": not_met, "bound": BOUND, "met": not not_met}


def one(name: str, case: str, tell: Tell) -> dict[str, Any]:
    """Run one cell; what kept it from being judged is a miss, too."""
    cell = CHECKS[name][case]
    if cell.absent:
        return {"what": cell.what, "absent": cell.absent}
    tell(f"{name} {case}: {cell.what}")
    began_s = time.monotonic()
    try:
        seen = _run(cell, case)
    except (TimeoutError, AssertionError, OSError) as error:
        took_s = round(time.monotonic() - began_s, 1)
        return row_of(cell.what, case, Seen((), 0.0, 0.0, seconds=took_s)) | {
            "missed": [f"it could not be judged: {type(error).__name__}: {str(error)[:600]}"],
            "met": False,
        }
    row = row_of(cell.what, case, seen)
    tell(f"{name} {case}: {'met' if row['met'] else row['missed']}\n")
    return row


def _run(cell: Cell, case: str) -> Seen:
    began_s = time.monotonic()
    with cell.site() as site:
        load_s = time.monotonic() - began_s
        probes, alarms = Probes(site.port, site.served), _Alarms(site)
        with alarms, contextlib.ExitStack() as asking:
            streams = begin(site.port, site.served, cell.tokens)
            if not cell.quiet:
                asking.enter_context(probes.asking())
            hit_s = time.monotonic()
            cell.inject(site)
            over_s = time.monotonic()
            if cell.quiet:
                asking.enter_context(probes.asking())
            ended = end(streams, cell.tokens)
            until_s = _back(probes, over_s)
        since_s = over_s if case == "d" or cell.quiet else hit_s
        gap_s = 0.0 if case == "d" else max((stream.gap_s for stream in ended), default=0.0)
        return Seen(
            ended,
            max(gap_s, longest_away_s(probes.seen, since_s, until_s)),
            load_s,
            len(probes.seen),
            sum(bool(probe.failed) for probe in probes.seen),
            tuple(alarms.seen),
            time.monotonic() - began_s,
        )


def _back(probes: Probes, since_s: float) -> float:
    """Return the time of the last good probe, for which a service that is away is given a while."""
    until_s = time.monotonic() + BACK_S
    over_s = time.monotonic()
    while time.monotonic() < until_s:
        lately = (probe for probe in list(probes.seen) if probe.began_s > max(since_s, over_s - 2.0))
        good = [probe.ended_s for probe in lately if not probe.failed]
        if good:
            return good[-1]
        time.sleep(LOOK_EVERY_S)
    return time.monotonic()


class _Alarms:
    """Collects what control holds against workers during a cell, each reason once, read twice a second."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.seen: dict[str, None] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for verdict in self._site.verdicts():
                if len(self.seen) < 40:
                    self.seen.setdefault(verdict)
