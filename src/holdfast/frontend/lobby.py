"""Requests for models that have no worker set here yet: one line per model, until the first worker has come.

Always true: a line has a bound and keeps those who stand first (`routing.tiers`), and all lines together have one, of
requests and of their bytes; nobody waits longer than may be, nor for a model that was wanted and is no longer; who
leaves, leaves its line at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.core.errors import Code
from holdfast.frontend.accounts import Account
from holdfast.frontend.api.errors import ApiError, no_worker, of_failure, too_busy
from holdfast.frontend.api.request import ParsedRequest
from holdfast.frontend.notes import NOTE_S, WaitNotes
from holdfast.routing.degradation import pushed_out
from holdfast.routing.tiers import TierLine
from holdfast.spec.waits import HoldSettings
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.flight import WorkerSet
from holdfast.streams.patience import Patience, no_longer_wanted
from holdfast.streams.states import State, Waiting
from holdfast.streams.stats import DispatchStats
from holdfast.wire.http.connection import HttpConnection

# Of all models together: some 20 MiB of tasks and connections,
WAITING_MAX = 4096
# and what they ask, as `held_bytes` counts it: eight of the largest bodies that are text.
WAITING_BYTES_MAX = 256 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Waiter:
    """One request."""

    account: Account
    model: str
    connection: HttpConnection
    wanted: bool = False  # its model was, when it was last looked
    pushed: ApiError | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Lobby:
    """All who wait for a set."""

    def __init__(
        self, directory: ModelDirectory, settings: HoldSettings, stats: DispatchStats, clock: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._lines: dict[str, TierLine[_Waiter]] = {}  # by model, none empty
        self._count = 0
        self.held_bytes = 0  # of all who wait
        self.on_starved: Callable[[], None] = lambda: None  # one more waits

    def __len__(self) -> int:
        return self._count

    def changed(self) -> None:
        """A worker has come, other models are wanted, or why none comes is another: everybody looks again."""
        for line in self._lines.values():
            for one in line:
                one.item.woken.set()

    async def wait(
        self,
        account: Account,
        connection: HttpConnection,
        parsed: ParsedRequest,
        find: Callable[[ParsedRequest], WorkerSet | None],
    ) -> WorkerSet:
        """The set that `find` finds, perhaps after a while; ApiError tells why none is waited for."""
        if (workers := find(parsed)) is not None:
            return workers
        waiter = _Waiter(account, parsed.model, connection)
        account.waited = True
        account.notes = WaitNotes(connection) if parsed.stream else None
        self._enter(waiter)
        try:
            while True:
                await self._look_up(waiter)
                if (workers := find(parsed)) is not None:
                    return workers
        finally:
            self._leave(waiter)

    async def _look_up(self, waiter: _Waiter) -> None:
        """Wait until something has changed; ApiError, if it need not wait any more."""
        waiter.woken.clear()
        waiter.wanted, missing = self._directory.wants(waiter.model), self._directory.missing(waiter.model)
        if waiter.wanted and missing.hopeless and not waiter.connection.streaming:
            raise no_worker(waiter.model, f"none can be started: {missing.why}")
        patience_s = Patience.bound_of(self._settings, wanted=waiter.wanted, missing=missing)
        try:
            async with asyncio.timeout_at(waiter.account.began_s + patience_s):
                await waiter.woken.wait()
        except TimeoutError:
            why = f"{missing.why}; " if missing.why else ""
            raise no_worker(waiter.model, f"{why}none has come up within {patience_s:g} s") from None
        if waiter.pushed is not None:
            raise waiter.pushed
        if waiter.wanted and not self._directory.knows(waiter.model):
            raise of_failure(Code.MODEL_UNAVAILABLE, no_longer_wanted(waiter.model), "model")

    def _enter(self, waiter: _Waiter) -> None:
        if self._count >= WAITING_MAX or self.held_bytes + waiter.account.held_bytes > WAITING_BYTES_MAX:
            self._count_refused(Code.RESOURCE_EXHAUSTED)
            raise too_busy("too many requests wait for models without a worker", "lobby_full")
        line = self._lines.get(waiter.model)
        if line is None:
            line = self._lines[waiter.model] = TierLine(self._settings.fresh_max, lambda one: one.connection.streaming)
        leaves = line.join(waiter, waiter.account.tier, waiter.account.began_s)
        if leaves is waiter:
            self._drop_if_empty(waiter.model)
            self._count_refused(Code.NO_WORKER)
            why = "no worker is up and too many requests wait already"
            raise of_failure(Code.NO_WORKER, why, retry_after_s=self._settings.hold_s)
        self._count += 1
        self.held_bytes += waiter.account.held_bytes
        self.on_starved()
        if leaves is not None:
            self._push_out(leaves)

    def _count_refused(self, code: Code) -> None:
        self._stats.refused[code] = self._stats.refused.get(code, 0) + 1

    def _push_out(self, waiter: _Waiter) -> None:
        tier = waiter.account.tier
        shed = pushed_out(tier, self._settings.shed_retry_s)
        self._stats.shed[tier.word, shed.reason] += 1
        waiter.pushed = of_failure(Code.PUSHED_OUT, shed.message, retry_after_s=shed.retry_after_s)
        waiter.woken.set()

    def _leave(self, waiter: _Waiter) -> None:
        self._count -= 1
        self.held_bytes -= waiter.account.held_bytes
        if (line := self._lines.get(waiter.model)) is not None:
            line.leave(waiter)
            self._drop_if_empty(waiter.model)

    def _drop_if_empty(self, model: str) -> None:
        if not len(self._lines[model]):
            del self._lines[model]

    # -- looking

    def waiting(self) -> Iterator[tuple[Account, Waiting]]:
        """All, line by line."""
        for model in list(self._lines):
            for waiter, waiting in self._line(model):
                yield waiter.account, waiting

    def _line(self, model: str) -> Iterator[tuple[_Waiter, Waiting]]:
        wanted, why = self._directory.wants(model), self._directory.missing(model).why
        for place, one in enumerate(self._lines[model], 1):
            yield one.item, Waiting(State.PROVISIONING, place, one.since_s, wanted, why)

    def demand(self) -> dict[str, tuple[int, float]]:
        """How many wait for each model, and since when the first of them does."""
        return {model: (len(line), min(one.since_s for one in line)) for model, line in self._lines.items()}

    async def remind(self) -> None:
        """Tell those who wait that they do; for ever."""
        while True:
            await asyncio.sleep(NOTE_S)
            now_s = self._clock()
            for model in list(self._lines):
                for waiter, waiting in self._line(model):
                    if waiter.account.notes is not None:
                        waiter.account.notes.tell(waiting, now_s)
