"""What the store says of manifests' deployments, as commands read it; and where the store is.

Always true: what is shown is whole as of one moment, and a store that does not answer is said to, within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.cli.checks import check_store, readable
from holdfast.cli.deployments.names import PROCESSES, bare
from holdfast.cli.screen import tilde
from holdfast.core.errors import UserError
from holdfast.core.tasks import beside, done_within
from holdfast.discovery.keys import DEPLOYMENTS, HISTORY, MODELS, NODES, ROLLOUT_STATUS, ROLLOUTS
from holdfast.rollout import machine
from holdfast.rollout.machine import RolloutState
from holdfast.rollout.records import (
    Change,
    DesiredDeployment,
    HistoryEntry,
    RolloutStatus,
    change_desired,
    decode_desired,
    decode_status,
    read_entry,
)
from holdfast.rollout.status import RolloutReport
from holdfast.spec.arguments import nearest
from holdfast.spec.settings import about
from holdfast.store.contract import Store, StoreUnavailable
from holdfast.store.mirror import Mirror
from holdfast.store.opening import open_store
from holdfast.supervise.lock import holder, last_holder
from holdfast.supervise.records import read_record
from holdfast.wire.net import SocketNetwork

PREFIXES = (DEPLOYMENTS, ROLLOUTS, ROLLOUT_STATUS, HISTORY)
WITH_FLEETS = (*PREFIXES, MODELS, NODES)
ANSWER_S = 5.0  # a store that runs answers in milliseconds
FOUND_S = 2.0  # a store that was started again, by everybody who lost it: they try once a second
NEAR = 0.5

StoreOption = Annotated[str, about("Store to use (default: the store of the deployment running here).", flag="--store")]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """One deployment, as the store has it."""

    name: str
    wanted: DesiredDeployment
    memory: RolloutState
    supervisor: RolloutStatus | None  # None: nobody carries it out
    entries: tuple[HistoryEntry, ...]

    @property
    def report(self) -> RolloutReport | None:
        """What its steward tells of what is wanted now; None: nothing yet."""
        told = self.supervisor is not None and self.supervisor.serial >= self.wanted.serial
        return self.supervisor.report if told and self.supervisor is not None else None

    @property
    def unheard(self) -> str:
        """Why nothing comes of what is wanted; "": something does."""
        if self.supervisor is None:
            return f"no supervisor runs {self.name}: `holdfast up -f FILE` continues it from the store"
        return self.supervisor.trouble


class Book:
    """The store, and what it says."""

    def __init__(self, store: Store, mirror: Mirror) -> None:
        self.store = store
        self._mirror = mirror

    async def whole(self) -> None:
        """Returns when all of it was read. UserError, if the store does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._mirror.whole.wait()
        except TimeoutError:
            raise UserError(f"{self.store!r}: no answer within {ANSWER_S:g} s") from None

    async def heard(self) -> None:
        """As `whole`; and who carries deployments out has said so, or had the time to: it does as soon as it has found
        a store that was started again."""
        await self.whole()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FOUND_S):
                while not all(ROLLOUT_STATUS + name in self.values for name in self.names):
                    await self.news(FOUND_S)

    async def news(self, bound_s: float) -> None:
        """Returns when something was heard, or the time is over."""
        await done_within(self._mirror.news.wait(), bound_s)
        self._mirror.news.clear()

    @property
    def values(self) -> dict[str, bytes]:
        return self._mirror.values

    @property
    def outages(self) -> int:
        """How often it was lost."""
        return self._mirror.outages

    @property
    def names(self) -> list[str]:
        return sorted(key.removeprefix(DEPLOYMENTS) for key in self._mirror.values if key.startswith(DEPLOYMENTS))

    @property
    def fleets(self) -> set[str]:
        """Whose models are wished for one by one; of a book `WITH_FLEETS`."""
        return {key.split("/")[2] for key in self._mirror.values if key.startswith((MODELS, NODES))} - {*self.names}

    def seen(self, name: str) -> Seen | None:
        """None: there is no such deployment. UserError, if what stands there cannot be read."""
        values = self._mirror.values
        if (held := values.get(DEPLOYMENTS + name)) is None:
            return None
        supervisor = decode_status(values.get(ROLLOUT_STATUS + name))
        read = (read_entry(key, value) for key, value in values.items() if key.startswith(f"{HISTORY}{name}/"))
        entries = sorted((entry for entry in read if entry is not None), key=lambda entry: entry.number)
        return Seen(name, decode_desired(name, held), _memory(name, values), supervisor, tuple(entries))

    def one(self, name: str) -> Seen:
        """The deployment of that name, or without a name the only one; UserError says which there are."""
        names, name = self.names, bare(name)
        if not name and len(names) == 1:
            name = names[0]
        found = self.seen(name) if name else None
        if found is not None:
            return found
        if name in self.fleets:
            each = "`holdfast evict KEY --forget` takes one away, `holdfast down` the fleet"
            raise UserError(f"{name} is a fleet, whose models `holdfast get models` shows; {each}")
        if not names:
            raise UserError("there are no deployments; `holdfast up -f FILE` starts one")
        if not name:
            raise UserError(f"which one? There are {', '.join(names)}")
        if name in PROCESSES:
            raise UserError(f"there is no deployment {name!r}; `holdfast status` shows its processes")
        near = nearest(name, names, NEAR)
        raise UserError(f"there is no deployment {name!r}; " + (f"did you mean {near}?" if near else _there(names)))


def carried(book: Book, name: str) -> Seen:
    """As `Book.one`, of one that somebody carries out: what is asked for comes true. UserError, if nobody does."""
    seen = book.one(name)
    if seen.supervisor is None:
        raise UserError(seen.unheard)
    return seen


async def asked_for(book: Book, name: str, change: Change) -> DesiredDeployment:
    """What is wanted from now on. UserError, if the store does not say that it is."""
    try:
        return await change_desired(book.store, name, change)
    except StoreUnavailable as error:  # no answer is no refusal, and what is not on its disk may be heard all the same
        unsure = f"whether {name} was changed is not known, and `holdfast get {name}` shows it"
        raise UserError(f"{unsure}: {error}") from error


async def known(book: Book, name: str, wanted: DesiredDeployment) -> Seen:
    """The deployment, once what was asked for is read back."""
    try:
        async with asyncio.timeout(ANSWER_S):
            while (seen := book.seen(name)) is None or seen.wanted.serial < wanted.serial:
                await book.news(ANSWER_S)
    except TimeoutError:
        raise UserError(f"{book.store!r}: no answer within {ANSWER_S:g} s") from None
    return seen


def _there(names: list[str]) -> str:
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _memory(name: str, values: dict[str, bytes]) -> RolloutState:
    held = values.get(ROLLOUTS + name)
    try:
        return machine.decode(held) if held is not None else machine.NOTHING
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"the store's {ROLLOUTS}{name} cannot be read: {error}") from error


@contextlib.asynccontextmanager
async def opened(url: str, prefixes: Sequence[str] = PREFIXES) -> AsyncIterator[Book]:
    """Reading it as long as the body runs; before it is `whole` it has what was heard until then."""
    store = open_store(url, SocketNetwork(), random.Random())
    mirror = Mirror(store, prefixes)
    await store.start()
    try:
        async with beside(mirror.run(), "what the store says"):
            yield Book(store, mirror)
    finally:
        await store.close()


def store_of(given: str, state_dir: Path, start: str = "holdfast up -f FILE") -> str:
    """Where the store is that a command means. UserError, where none can be, names the command that starts one."""
    if given:
        check_store(given)
        return given
    ours = f"unix://{state_dir}/run/store.sock"
    alive = holder(readable(state_dir))
    last = alive or last_holder(state_dir)
    record = read_record(state_dir, "store")
    if last is not None and last.store not in ("", ours):
        return last.store
    if alive is None and (record is None or not record.alive):
        here = tilde(state_dir)
        raise UserError(f"nothing runs in {here}: start it with `{start}`, or name a store with --store")
    return ours


def answered(work: Coroutine[Any, Any, T]) -> T:
    """Do it; what the store does not do in time is a line for a person."""
    try:
        return asyncio.run(work)
    except StoreUnavailable as error:
        raise UserError(str(error)) from error
