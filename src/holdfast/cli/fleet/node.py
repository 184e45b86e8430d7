"""`holdfast node join`: join a fleet with this machine as one more node.

Always true: a node that is reported as joined is in `holdfast get nodes`; no two nodes of a fleet have one name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

from msgspec.structs import replace

from holdfast import __version__
from holdfast.cli.arguments import CommandOptions
from holdfast.cli.checks import check_machine, own
from holdfast.cli.deployments.book import ANSWER_S, StoreOption, answered, opened
from holdfast.cli.fleet.observed import PREFIXES, DeploymentOption, FleetStore, fleet_at, where
from holdfast.cli.fleet_up import node_name, totals_of
from holdfast.cli.keeping import keep, taken_lock
from holdfast.cli.manifest_up import ALL
from holdfast.cli.screen import Screen, tilde
from holdfast.core.errors import UserError, refuse_user_errors
from holdfast.core.procfs import read_process
from holdfast.fleet.records import NodeRecord
from holdfast.roles.devices import choose
from holdfast.roles.hosted import NodeSite
from holdfast.roles.joined import Joined
from holdfast.roles.starting import Doing
from holdfast.settings import Environment, handed_on
from holdfast.spec.deployment import DeploymentSpec, check_state_dir
from holdfast.spec.names import node_dir
from holdfast.spec.settings import about
from holdfast.supervise.lock import Holder, holder, sign

LEASE_S = 12.0  # a killed one's lease lasts no longer: etcd gives ten seconds
WAIT_S = 60.0  # until it has adopted what an earlier one left


class Node(CommandOptions, frozen=True):
    """`holdfast node join`."""

    lasting: ClassVar[bool] = True

    store: StoreOption = ""
    deployment: DeploymentOption = ""
    spec: Annotated[DeploymentSpec, about("Settings of the node.")] = DeploymentSpec("")
    device: Annotated[
        str, about("auto (all GPUs, if there are any), cpu, or GPUs: cuda-0,cuda-1 or their UUIDs.", panel="The fleet")
    ] = "auto"
    detach: Annotated[bool, about("Run in the background.", short="-d")] = False
    untied: Annotated[
        bool,
        about(
            "Keep replicas running if this command is killed; the next `holdfast node join` adopts them (for systemd).",
            expert=True,
        ),
    ] = False

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(spec=DeploymentSpec(env.deployment, log_level=env.log_level))

    def run(self, env: Environment) -> int:
        name, url = node_name(self.spec), where(self.store, env)
        state_dir = node_dir(env.state_dir, name)
        with refuse_user_errors():
            check_machine()
            check_state_dir(state_dir)
            totals = totals_of(replace(self.spec, gpus=choose("torch", self.device, ALL).gpus))
        if not state_dir.exists():  # a refused command leaves nothing behind
            answered(self._fleet(url, name, env))
        with refuse_user_errors():
            own(env.state_dir)
            own(state_dir)
        lock = taken_lock(state_dir, "", lambda: _already(state_dir, name))
        try:
            sign(lock, Holder(os.getpid(), store=url))
            site = NodeSite(
                deployment=answered(self._fleet(url, name, env)),
                name=name,
                state_dir=str(state_dir),
                store=url,
                environ=handed_on(),
                totals=totals,
                reach=self.spec.node_address,
                secrets_dir=env.secrets_dir,
            )
            return keep(Joining(Screen(), Joined(site), self.detach), lock, detach=self.detach, tied=not self.untied)
        finally:
            os.close(lock)

    async def _fleet(self, url: str, name: str, env: Environment) -> str:
        """Return the fleet to join. UserError, if there is none, or it has a node of that name."""
        async with fleet_at(url, self.deployment, env) as fleet:
            loop = asyncio.get_running_loop()
            until_s = loop.time() + LEASE_S
            while (found := fleet.observed.nodes.get(name)) is not None:
                if _lives_here(found) or loop.time() > until_s:
                    agent = f"pid {found.pid} on {found.host}"
                    raise UserError(f"{fleet.deployment} has a node {name} ({agent}); choose another name with --node")
                await fleet.book.news(until_s - loop.time())
            return fleet.deployment


def _lives_here(record: NodeRecord) -> bool:
    """Return True if its agent is a running process of this machine; of other machines only the lease says so."""
    return record.host == os.uname().nodename and read_process(record.pid) is not None


def _already(state_dir: Path, name: str) -> str:
    found = holder(state_dir)
    pid = f" (pid {found.pid})" if found is not None and found.pid else ""
    see = f"see `holdfast status --node {name}`, stop it with `holdfast down --node {name}`"
    return f"node {name} runs already{pid}: {see}"


@dataclass(frozen=True, slots=True)
class Joining:
    """A node that joins, and what is shown of it, in the foreground and detached alike."""

    screen: Screen
    kept: Joined
    detached: bool

    @property
    def wait_s(self) -> float:
        return WAIT_S

    @property
    def starting(self) -> str:
        return f"joining {self.kept.node.deployment} as {self.kept.node.name} …"

    async def follow(self, show: Callable[[Doing], None]) -> None:
        """Show nothing."""

    async def show(self, lack: str = "") -> None:
        site = self.kept.node
        if not lack:
            lack = await self._untold()
        does = f"runs, but {lack}" if lack else f"is up: node {site.name} of the fleet {site.deployment}"
        self.screen.line(f"\nHoldfast {__version__} {does}\n", style="bold")
        end = f"`holdfast down --node {site.name}` stops it" if self.detached else "Ctrl-C stops it"
        logs = f"Logs are in {tilde(self.kept.state_dir / 'logs')}."
        shown = f"`holdfast get nodes` shows all nodes, `holdfast status --node {site.name}` this one"
        self.screen.line(f"{logs} {shown}; {end}.")

    async def _untold(self) -> str:
        """Wait until the fleet lists the node; return "", or a warning if it does not in time."""
        site = self.kept.node
        async with opened(site.store, PREFIXES) as book:
            fleet, loop = FleetStore(book, site.deployment), asyncio.get_running_loop()
            until_s = loop.time() + ANSWER_S
            while site.name not in fleet.observed.nodes:
                if loop.time() > until_s:
                    return f"the store {site.store} does not know of it yet"
                await book.news(until_s - loop.time())
        return ""
