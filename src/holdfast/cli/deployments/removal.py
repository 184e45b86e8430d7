"""`holdfast delete`: take a deployment away.

Always true: who is told that it is gone finds nothing of it left: no process, no record, no supervisor that holds its
state directory. Where nobody carries it out, that is done here if none of its processes runs; else it is not asked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated

from holdfast.cli.arguments import CommandOptions, Filename
from holdfast.cli.deployments.book import (
    ANSWER_S,
    WITH_FLEETS,
    Book,
    StoreOption,
    answered,
    asked_for,
    opened,
    store_of,
)
from holdfast.cli.deployments.files import said_in, shaped
from holdfast.cli.deployments.names import KINDS, bare
from holdfast.cli.deployments.waiting import DryRun, Timeout, gone, seconds
from holdfast.cli.deployments.words import name_of
from holdfast.cli.screen import Screen
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError
from holdfast.core.tasks import beside
from holdfast.discovery.keys import CONTROLS, INSTANCES, REPORTS, STANDBYS, parse_key
from holdfast.rollout.records import RolloutStatus, deleted, forget, read_status
from holdfast.settings import Environment
from holdfast.spec.arguments import UsageError
from holdfast.spec.settings import about
from holdfast.store.mirror import Mirror
from holdfast.supervise.leftovers import clear
from holdfast.supervise.lock import holder
from holdfast.supervise.records import read_records

ENDED_S = 30.0  # for a supervisor whose deployment is gone: it stops a control and a store
LOOK_S = 0.05


class Delete(CommandOptions, frozen=True):
    """`holdfast delete`."""

    name: Annotated[str, about("Deployment name.", positional=True, flag="NAME", kinds=KINDS)] = ""
    file: Filename = None
    wait: Annotated[bool, about("Wait until the deployment is gone.", flag="--wait/--no-wait")] = True
    timeout: Timeout = "0"
    dry_run: DryRun = False
    ignore_not_found: Annotated[bool, about("Succeed if the deployment does not exist.")] = False
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        kind, slash, request = self.name.partition("/")
        if slash and kind in ("request", "requests"):
            from holdfast.cli.requests import EndRequestCommand

            return EndRequestCommand(id=request, store=self.store).run(env)
        if bool(self.name) == (self.file is not None):
            raise UsageError("`holdfast delete` needs the deployment's name, or -f FILE")
        timeout_s, name = seconds("--timeout", self.timeout), bare(self.name)
        if self.file is not None:
            name = shaped(said_in("delete", self.file)).manifest.name
        supervisor = answered(self._delete(name, store_of(self.store, env.state_dir), timeout_s, env.state_dir))
        if supervisor is not None:
            _wait_for_end(supervisor, env.state_dir)
        return 0

    async def _delete(self, name: str, url: str, timeout_s: float | None, state_dir: Path) -> RolloutStatus | None:
        """Whose end is to be waited for."""
        async with opened(url, WITH_FLEETS) as book:
            await book.heard()
            if self.ignore_not_found and book.seen(name) is None:
                return None
            seen = book.one(name)
            if seen.supervisor is None and (left := await _running(book, name)):
                raise UserError(f"{seen.unheard}, and {left} of its processes run; `holdfast down` stops them")
            if self.dry_run:
                write_out(f"{name_of(name)} deleted (dry run)\n")
                return None
            await asked_for(book, name, deleted(name, time.time()))
            write_out(f"{name_of(name)} deleted\n")
            if await read_status(book.store, name) is None:
                await forget(book.store, name)
                clear(state_dir, name, [record.name for record in read_records(state_dir)])
            if not self.wait:
                return None
            await gone(book, name, Screen(), timeout_s)
            return seen.supervisor


async def _running(book: Book, name: str) -> int:
    """How many processes of it the store knows of."""
    own = (f"{REPORTS}{name}/", f"{CONTROLS}{name}/")
    mirror = Mirror(book.store, (INSTANCES, STANDBYS, *own))
    async with beside(mirror.run(), "its processes"), asyncio.timeout(ANSWER_S):
        await mirror.whole.wait()
    keys = [parse_key(prefix, key) for key in mirror.values for prefix in (INSTANCES, STANDBYS)]
    workers = sum(key is not None and key.deployment == name for key in keys)
    return workers + sum(key.startswith(own) for key in mirror.values)


def _wait_for_end(supervisor: RolloutStatus, state_dir: Path) -> None:
    """Returns when its supervisor has left the state directory to others, where that is this one."""
    if not supervisor.is_at(RolloutStatus(pid=0, host=os.uname().nodename, state_dir=str(state_dir))):
        return
    until_s = time.monotonic() + ENDED_S
    while (found := holder(state_dir)) is not None and found.pid == supervisor.pid:
        if time.monotonic() > until_s:
            raise UserError(f"it is gone, but its supervisor ({supervisor}) has not ended within {ENDED_S:g} s")
        time.sleep(LOOK_S)  # a lock cannot be waited for without taking it
