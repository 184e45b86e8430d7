"""`holdfast drain`: move a node's replicas to other nodes, and let the node take no new ones.

Always true: only the node's cordon is written, from what is stored at that moment; control does the rest, with or
without this command. A node whose replicas no other node could take is not cordoned: nothing would come of it but
models that cannot be started.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
import time
from typing import Annotated

import msgspec

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.deployments.book import ANSWER_S, StoreOption, answered
from holdfast.cli.deployments.waiting import DryRun, Timeout, seconds
from holdfast.cli.fleet.observed import (
    JOIN,
    NEAR,
    PREFIXES,
    DeploymentOption,
    FleetStore,
    ObservedFleet,
    fleet_at,
    where,
)
from holdfast.cli.fleet.waiting import QUIET_S, LastingTrouble, trouble_of, wait_for
from holdfast.cli.fleet.words import NodeShown, node_shown
from holdfast.cli.screen import Screen
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import UserError
from holdfast.discovery.keys import ORDERS
from holdfast.fleet.actions import COMING, PendingAction
from holdfast.fleet.desired import Cordon
from holdfast.fleet.observed import Observed, Replica, ReplicaPhase
from holdfast.fleet.planner import plan
from holdfast.fleet.records import cordon_key, read
from holdfast.settings import Environment
from holdfast.spec.arguments import UsageError, meant
from holdfast.spec.settings import about
from holdfast.store.contract import StoreUnavailable, update_record

TIMEOUT_S = 10.0  # of one call: a store that restarts is back in a second or two
NAMES_MAX = 20  # nodes or replicas that are listed in one message: what fits on a screen
JOIN_ANOTHER = {**JOIN, "": "`holdfast node join --node NAME` adds a node"}


class DrainShown(msgspec.Struct, frozen=True, kw_only=True):
    """A drain for programs: the node, and why each of its replicas is still there ("": it is not drained)."""

    node: NodeShown
    empty: bool
    stay: dict[str, str]


class Drain(CommandOptions, frozen=True):
    """`holdfast drain`."""

    node: Annotated[
        str, about("Node name, as shown by `holdfast get nodes`.", positional=True, required=True, flag="NODE")
    ] = ""
    undo: Annotated[bool, about("Let the node take replicas again, and keep those that it still has.")] = False
    wait: Annotated[bool, about("Wait until the node is empty.", flag="--wait/--no-wait")] = True
    timeout: Timeout = "10m"
    dry_run: DryRun = False
    json: Json = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        if "/" in self.node:
            raise UsageError(f"a node's name has no slash; got {self.node!r}")
        timeout_s = seconds("--timeout", self.timeout)
        return answered(self._run(where(self.store, env), env, timeout_s))

    async def _run(self, url: str, env: Environment, timeout_s: float | None) -> int:
        async with fleet_at(url, self.deployment, env, (*PREFIXES, ORDERS)) as fleet:
            check_node(fleet.observed, self.node)
            return await (self._undo(fleet) if self.undo else self._drain(fleet, timeout_s))

    async def _undo(self, fleet: FleetStore) -> int:
        is_cordoned = self.node in fleet.observed.cordons
        if not self.dry_run:  # one that cannot be read is removed too
            is_cordoned = await write_cordon(fleet, self.node, None)
        told = "takes replicas again" if is_cordoned else "is not drained"
        return self._say(fleet, f"node {self.node} {told}{' (dry run)' if self.dry_run else ''}")

    async def _drain(self, fleet: FleetStore, timeout_s: float | None) -> int:
        check_others(fleet.observed, self.node)
        if self.dry_run:
            return self._say(fleet, forecast(fleet.observed, self.node, time.time()) + " (dry run)")
        await write_cordon(fleet, self.node, Cordon(at=time.time(), by=_user()))
        if not self.json:
            write_out(f"{forecast(fleet.observed, self.node, time.time())}\n")
        try:
            if self.wait:
                screen = Screen(Terminal(sys.stderr) if self.json else None)
                await wait_for(fleet, f"node {self.node}", DrainWait(self.node), screen, timeout_s)
        finally:
            if self.json:
                show_json(shown(fleet.observed, self.node))
        return 0

    def _say(self, fleet: FleetStore, text: str) -> int:
        if self.json:
            return show_json(shown(fleet.observed, self.node))
        write_out(f"{text}\n")
        return 0


def _user() -> str:
    try:
        return f"{getpass.getuser()}@{os.uname().nodename}"
    except (KeyError, OSError):  # a user without a name
        return f"{os.getuid()}@{os.uname().nodename}"


# -- checks


def check_node(observed: ObservedFleet, node: str) -> None:
    """Raise UserError if the fleet knows no such node, and none of that name is cordoned."""
    names = sorted({*observed.nodes, *observed.cordons})
    if node not in names:
        listed = ", ".join(names[:NAMES_MAX]) + (" …" if len(names) > NAMES_MAX else "")
        known = f"there {'is' if len(names) == 1 else 'are'} {listed}" if names else JOIN_ANOTHER[observed.backend]
        raise UserError(f"{observed.deployment} has no node {node!r}; {meant(node, names, known, NEAR)}")


def check_others(observed: ObservedFleet, node: str) -> None:
    """Raise UserError if a node has replicas, and no other node takes any."""
    there = observed.nodes[node].replicas if node in observed.nodes else ()
    lost, others = observed.record.lost, [name for name in observed.nodes if name != node]
    if not there or any(name not in lost and name not in observed.cordons for name in others):
        return
    why = {name: "lost" if name in lost else "drained" for name in sorted(others)[:NAMES_MAX]}
    states = ", ".join(f"{name} is {state}" for name, state in why.items())
    lack = f"no other node takes replicas ({states})" if others else f"it is the only node of {observed.deployment}"
    mend = f"{JOIN_ANOTHER[observed.backend]}; then drain {node}"
    left = "replica stays" if len(there) == 1 else "replicas stay"
    raise UserError(f"nothing can move from {node}: {lack}; its {len(there)} {left}, and nothing is changed. {mend}")


# -- what moves, and what stays


def forecast(observed: ObservedFleet, node: str, now_s: float) -> str:
    """Return, for people, which replicas of a node will move and which fit nowhere else now."""
    there = observed.nodes[node].replicas if node in observed.nodes else ()
    if not there:
        return f"node {node} takes no new replicas; it has none"
    unmet = _unmet_without(observed, node, now_s)
    lines = [f"node {node} takes no new replicas; {len(there)} of it are replaced on other nodes, and leave then:"]
    for one in there[:NAMES_MAX]:
        runs = f", {one.running} running" if one.running else ""
        stays = f"; it stays for now: {unmet[one.model]}" if one.model in unmet else ""
        lines.append(f"  {one.model} {one.id} ({one.level.word}{runs}){stays}")
    if len(there) > NAMES_MAX:
        lines.append(f"  … and {len(there) - NAMES_MAX} more")
    return "\n".join(lines)


def _unmet_without(observed: ObservedFleet, node: str, now_s: float) -> dict[str, str]:
    """Return the models for which the planner's next pass finds no place, and why."""
    lost, record = observed.record.lost, observed.record
    nodes = {name: msgspec.structs.replace(one.node, alive=name not in lost) for name, one in observed.nodes.items()}
    pending = {
        action.id: PendingAction(action, action.id in one.overdue)
        for one in observed.orders.values()
        for action in one.actions
    }
    replicas = {each.name: each for one in observed.nodes.values() for each in one.replicas}
    seen = Observed(nodes=nodes, replicas=replicas, pending=pending, tries=record.tries, serials=record.serials)
    cordons = {**observed.cordons, node: Cordon()}
    return plan([one.model for one in observed.desired.values()], seen, now_s, cordons=cordons).unmet


def why_there(observed: ObservedFleet, one: Replica) -> str:
    """Return why a replica is still on its drained node."""
    if one.phase is ReplicaPhase.DRAINING:
        return f"it drains, {one.running} running"
    if one.phase is ReplicaPhase.GONE:
        return "it has ended, and its memory is not free yet"
    if one.model not in observed.desired and one.model not in observed.record.serials:
        return "its model was never deployed in this fleet"
    coming = [
        other
        for other in observed.replicas(one.model)
        if other.node not in observed.cordons and other.phase is ReplicaPhase.PROVISIONING
    ]
    if coming:
        return f"its replacement {coming[0].id} is coming up on {coming[0].node}"
    return observed.record.unmet.get(one.model) or "it is about to leave"


def shown(observed: ObservedFleet, node: str) -> DrainShown:
    found = node_shown(observed, node)
    there = observed.nodes[node].replicas if node in observed.nodes else ()
    drains = node in observed.cordons
    return DrainShown(
        node=found,
        empty=found.alive and not there,
        stay={one.name: why_there(observed, one) if drains else "" for one in there},
    )


class DrainWait:
    """Decides from one look to the next whether a node is empty."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._quiet = LastingTrouble(QUIET_S)

    def look(self, observed: ObservedFleet, now_s: float, away: str = "") -> str | None:
        """Return as `Wait.look` does. A node is empty once control knows of its cordon, no order is left that places
        anything there, and nothing is there."""
        node, record = self._node, observed.nodes.get(self._node)
        if not away and node not in observed.cordons:
            raise UserError(f"the drain of {node} was undone meanwhile")
        if not away and record is not None and not self._trouble(observed) and self._is_empty(observed):
            return f"it is empty and can be stopped; `holdfast drain {node} --undo` uses it again"
        self._quiet.note(away or self._trouble(observed), now_s)
        return None

    def _trouble(self, observed: ObservedFleet) -> str:
        if self._node not in observed.nodes:
            return f"node {self._node} is gone; it stays cordoned until `holdfast drain {self._node} --undo`"
        if self._node in observed.record.lost:
            return f"node {self._node} does not report: what runs there is not known"
        return trouble_of(observed)

    def _is_empty(self, observed: ObservedFleet) -> bool:
        ordered = observed.orders[self._node].actions if self._node in observed.orders else ()
        is_coming = any(action.verb in COMING for action in ordered)
        is_known = self._node in observed.record.cordoned
        return is_known and not is_coming and not observed.nodes[self._node].replicas

    def progress(self, observed: ObservedFleet) -> str:
        there = observed.nodes[self._node].replicas if self._node in observed.nodes else ()
        told = [f"{one.model} {one.id}: {why_there(observed, one)}" for one in there[:NAMES_MAX]]
        return "; ".join([f"{len(there)} left", *told])

    def goes_on(self, observed: ObservedFleet) -> str:
        see, undo = "`holdfast get nodes` shows how far it is", f"`holdfast drain {self._node} --undo` ends it"
        return f"node {self._node}: {self.progress(observed)}. The drain goes on: {see}, {undo}"


# -- the write


async def write_cordon(fleet: FleetStore, node: str, cordon: Cordon | None) -> bool:
    """Write a node's cordon, unless it is drained already; None: remove it. Return, once it is read back, whether
    anything was changed."""
    key = cordon_key(fleet.deployment, node)

    def change(held: bytes | None) -> bytes | None:
        if cordon is None or (held is not None and read(Cordon, key, held).drain):
            return None if cordon is None else held
        return msgspec.json.encode(cordon)

    try:
        _, written = await update_record(fleet.book.store, key, change, TIMEOUT_S)
        async with asyncio.timeout(ANSWER_S):
            while (node in fleet.observed.cordons) is (cordon is None):
                await fleet.book.news(ANSWER_S)
        return written
    except StoreUnavailable as error:  # no answer is no refusal
        raise UserError(f"whether {node} is drained is not known, `holdfast get nodes` shows it: {error}") from error
    except TimeoutError:
        raise UserError(f"{fleet.book.store!r}: no answer within {ANSWER_S:g} s") from None
