"""`holdfast evict`, and `holdfast scale` of a model: change the number of a model's replicas, or remove them.

Always true: only the desired state is written, from what is stored at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.deployments.book import StoreOption, answered
from holdfast.cli.deployments.waiting import Timeout, Wait, seconds
from holdfast.cli.fleet.observed import DeploymentOption, FleetStore, Key, fleet_at, where
from holdfast.cli.fleet.waiting import WaitOptions, end
from holdfast.core.errors import UserError
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.desired_changes import evict_all, evict_one, remove_model, scale_to
from holdfast.fleet.observed import Replica, ReplicaPhase
from holdfast.fleet.records import DesiredModel
from holdfast.settings import Environment
from holdfast.spec.arguments import UsageError
from holdfast.spec.settings import about


async def scale_model(
    key: str, replicas: int, url: str, deployment: str, env: Environment, options: WaitOptions
) -> int:
    """Set the number of HOT replicas of a fleet's model; return the command's exit status."""
    async with fleet_at(url, deployment, env) as fleet:
        fleet.observed.check(key)
        desired = await fleet.ask(key, scale_to(key, replicas))
        assert desired is not None, "scaling does not remove a model"
        told = f"model {key}: {replicas} desired"
        if desired.scaling is not None:
            told += "; autoscaling may change that"
        return await end(fleet, key, desired, told, options)


class Evict(CommandOptions, frozen=True):
    """`holdfast evict`."""

    key: Key = ""
    replica: Annotated[
        str, about("Evict only this replica, e.g. r3 (default: all replicas).", positional=True, flag="REPLICA")
    ] = ""
    shrink: Annotated[
        bool, about("With REPLICA: also reduce the replica count by one, so that no replacement is started.")
    ] = False
    forget: Annotated[bool, about("Remove the model from the fleet; clients then get an unknown-model error.")] = False
    wait: Wait = False
    timeout: Timeout = "10m"
    json: Json = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        if self.shrink and not self.replica:
            raise UsageError("--shrink needs a REPLICA; to change the number of replicas, use `holdfast scale KEY N`")
        if self.forget and self.replica:
            raise UsageError("--forget is for a model, and REPLICA is one of its replicas; leave one out")
        options = WaitOptions(self.wait, seconds("--timeout", self.timeout), self.json)
        return answered(self._evict(where(self.store, env), env, options))

    async def _evict(self, url: str, env: Environment, options: WaitOptions) -> int:
        async with fleet_at(url, self.deployment, env) as fleet:
            fleet.observed.check(self.key)
            if self.replica:
                return await self._evict_one(fleet, options)
            change = remove_model(self.key) if self.forget else evict_all(self.key)
            desired = await fleet.ask(self.key, change)
            left = sum(one.on_devices or desired is None for one in fleet.observed.replicas(self.key))
            leave = f"; its {left} {'replica leaves' if left == 1 else 'replicas leave'} when requests have ended"
            does = "forgotten" if desired is None else f"evicted: 0 desired, {_kept(desired)}"
            what = f"model {self.key} {does}"
            return await end(fleet, self.key, desired, what + (leave if left else ""), options)

    async def _evict_one(self, fleet: FleetStore, options: WaitOptions) -> int:
        found = {one.serial: one for one in fleet.observed.replicas(self.key)}
        names = {name: one for one in found.values() for name in (one.name, one.id, str(one.serial))}
        one = names.get(self.replica)
        if one is None:
            ids = ", ".join(one.id for one in found.values()) or "none"
            raise UserError(f"{self.key} has no replica {self.replica!r}; it has {ids}")
        if self.shrink and one.level is Level.WARM:
            raise UserError(f"{one.id} is WARM and does not count as one of the desired replicas; leave --shrink out")
        desired = await fleet.ask(self.key, evict_one(self.key, one.serial, found, shrink=self.shrink))
        assert desired is not None, "evicting a replica does not remove its model"
        leaves = "leaves host memory" if one.level is Level.WARM else "leaves when its requests have ended"
        instead = f"{desired.model.hot} desired" if self.shrink else _instead(desired.model, found.values())
        told = f"replica {one.id} of {self.key} on {one.node} {leaves}; {instead}"
        return await end(fleet, self.key, desired, told, options)


def _instead(model: Model, replicas: Iterable[Replica]) -> str:
    """Return, in words, whether a replacement will be started for the evicted replicas."""
    stay = [
        one
        for one in replicas
        if one.serial not in model.going and one.phase in (ReplicaPhase.PROVISIONING, ReplicaPhase.READY)
    ]
    hot = sum(one.level is Level.HOT for one in stay)
    if hot < model.hot or len(stay) < model.kept:
        return "another will be started in its place"
    return f"not replaced: {model.hot} desired" + (f", {hot} HOT without it" if hot else "")


def _kept(desired: DesiredModel) -> str:
    return "WARM at most, until its host memory is needed" if desired.model.host_bytes else "none kept"
