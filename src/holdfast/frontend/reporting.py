"""Tells control what this frontend sees: a leased key in the store, written when it changed: once a second, and at once
when a request has come that nobody serves, since a fleet fetches its model then.

Nothing waits for it and nothing depends on it: without a control, or a store, requests are served all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from holdfast.discovery.keys import REPORTS
from holdfast.frontend.accounts import Accounts, Ended
from holdfast.health.records import Demand, Killed, Report
from holdfast.store.contract import Registration, Store
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.roster import Roster

PERIOD_S = 1.0
REST_S = 0.1  # between two reports, whoever waits


class Reporting:
    """One frontend's report to one deployment, of that deployment's workers and requests."""

    def __init__(
        self,
        store: Store,
        deployment: str,
        roster: Roster,
        directory: ModelDirectory,
        accounts: Accounts,
        unix_s: Callable[[], float],
        process: str = "",
        demand: Callable[[], dict[str, Demand]] = dict,
        killed: Callable[[str], tuple[Killed, ...]] = lambda _: (),
    ) -> None:
        self._store = store
        self._deployment = deployment
        self._process = process
        self._key = f"{REPORTS}{deployment}/{roster.peer}"
        self._roster = roster
        self._directory = directory
        self._accounts = accounts
        self._unix_s = unix_s
        self._demand = demand
        self._killed = killed
        self._told: Report | None = None
        self._registration: Registration | None = None
        self._soon = asyncio.Event()

    def soon(self) -> None:
        """What is to be told does not wait for its turn."""
        self._soon.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S - REST_S):
                    await self._soon.wait()
            self._soon.clear()
            self.tell()
            await asyncio.sleep(REST_S)

    def tell(self) -> None:
        """What is to be seen now, if it is another than was told."""
        report = self._report()
        if self._told is not None and report == msgspec.structs.replace(self._told, at_unix_s=report.at_unix_s):
            return
        self._told = report
        value = msgspec.json.encode(report)
        if self._registration is None:
            self._registration = self._store.register(self._key, value)
        else:
            self._registration.update(value)

    def _report(self) -> Report:
        own, ended = self._deployment, self._accounts.ended.get(self._deployment, Ended())
        sets = self._directory.of_deployment(own)
        return Report(
            name=self._roster.peer,
            at_unix_s=self._unix_s(),
            process=self._process,
            workers=self._roster.told(own),
            admitted=self._roster.admitted(own),
            refused=self._roster.refused(own),
            waiting=sum(len(workers.holds) for workers in sets),
            held={workers.namespace: workers.held for workers in sets if workers.held},
            demand=self._demand(),
            killed=self._killed(own),
            ended=ended.requests,
            prompt_tokens=ended.prompt_tokens,
            answer_tokens=ended.answer_tokens,
            answers=self._accounts.answers,
            answers_failed=self._accounts.answers_failed,
        )
