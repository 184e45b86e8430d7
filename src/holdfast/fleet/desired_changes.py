"""Makes a model's desired state from a manifest's worker service, and one desired state from the one before.

Always true: a deploy replaces the whole desired state, except what it does not say and others found out: how many
replicas are wanted now, and how long a load takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec import structs

from holdfast.core.errors import UserError
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.records import DesiredModel, desired_key, read
from holdfast.fleet.scaling import Scaling
from holdfast.spec.engines import GIB
from holdfast.spec.manifest.fleet import Autoscale
from holdfast.spec.manifest.types import Service
from holdfast.store.contract import Store, update_record

TIMEOUT_S = 10.0  # of one call: a store that restarts is back in a second or two
LEVELS = {"hot": Level.HOT, "warm": Level.WARM, "cold": Level.COLD}


def model_from_service(key: str, service: Service, version: str, needed_bytes: int) -> Model:
    """Return the desired state of a worker service. `needed_bytes`: on each device, where the manifest does not say;
    ValueError, if that is not known either."""
    fleet = service.fleet
    return Model(
        key=key,
        version=version,
        replicas_min=fleet.replicas_min,
        replicas_max=fleet.replicas_max or max(1, service.replicas, fleet.replicas_min),
        wanted=service.replicas,
        floor=LEVELS[fleet.level],
        dedicated=fleet.dedicated,
        nodes=frozenset(fleet.nodes),
        per_node_max=fleet.per_node,
        devices=max(1, service.gpus),
        device_bytes=in_bytes(fleet.memory_gib) or needed_bytes,
        host_bytes=in_bytes(fleet.host_gib),
        load_s=fleet.ready_seconds,
        drain_s=fleet.drain_seconds,
    )


def scaling_from(autoscale: Autoscale) -> Scaling | None:
    if not autoscale.enabled:
        return None
    return Scaling(
        wait_s_max=autoscale.wait_seconds,
        kv_high=autoscale.kv_high,
        kv_low=autoscale.kv_low,
        high_s=autoscale.up_after_seconds,
        low_s=autoscale.down_after_seconds,
        step_up_s=autoscale.up_every_seconds,
        step_down_s=autoscale.down_every_seconds,
        idle_s=autoscale.idle_seconds,
        devices_max=autoscale.devices_max,
    )


def in_bytes(gib: float) -> int:
    return round(gib * GIB)


# -- changes

DesiredChange = Callable[[DesiredModel | None], DesiredModel | None]


async def update_desired(store: Store, deployment: str, key: str, change: DesiredChange) -> DesiredModel | None:
    """Change a model's desired state, from what is stored at this moment; return the result."""
    where = desired_key(deployment, key)

    def next_generation(held: bytes | None) -> bytes | None:
        before = None if held is None else read(DesiredModel, where, held)
        after = change(before)
        if after is None or after == before:
            return None if after is None else held
        generation = before.model.generation + 1 if before is not None else 1
        return msgspec.json.encode(structs.replace(after, model=structs.replace(after.model, generation=generation)))

    value, _ = await update_record(store, where, next_generation, TIMEOUT_S)
    return None if value is None else read(DesiredModel, where, value)


def scale_to(key: str, wanted: int) -> DesiredChange:
    """Set the number of HOT replicas; UserError, if it is out of the model's bounds."""

    def change(before: DesiredModel | None) -> DesiredModel:
        desired = existing(key, before)
        least = desired.model.replicas_min if desired.model.floor is Level.HOT else 0
        most = desired.model.replicas_max
        if wanted > most:
            raise UserError(f"{key} has {most} replicas at most; deploy it with --max {wanted} for more")
        if wanted < least:
            raise UserError(f"{key} has {least} HOT replicas at least; deploy it with --min {wanted} for fewer")
        return structs.replace(desired, model=structs.replace(desired.model, wanted=wanted))

    return change


def existing(key: str, before: DesiredModel | None) -> DesiredModel:
    if before is None:
        raise UserError(f"there is no model {key!r}; `holdfast get models` shows those that there are")
    return before


def deploy(asked: DesiredModel, *, counts: bool) -> DesiredChange:
    """Replace the desired state. `counts`: also the number of replicas; else as many as before, within the new
    bounds."""

    def change(before: DesiredModel | None) -> DesiredModel:
        if before is None:
            return asked
        model = structs.replace(asked.model, generation=before.model.generation, going=before.model.going)
        if not counts:
            least = model.replicas_min if model.floor is Level.HOT else 0
            model = structs.replace(model, wanted=min(max(before.model.wanted, least), model.replicas_max))
        if model.version == before.model.version:
            model = structs.replace(model, reload_s=before.model.reload_s)
        after = structs.replace(asked, model=model)
        # The manifest text of one version may differ in comments, and in numbers that the model has.
        same = structs.replace(after, manifest=before.manifest, at_unix_s=before.at_unix_s)
        return before if same == before else after

    return change


def evict_all(key: str) -> DesiredChange:
    """Scale a model to zero without a floor; it stays in the fleet."""

    def change(before: DesiredModel | None) -> DesiredModel:
        desired = existing(key, before)
        return structs.replace(desired, model=structs.replace(desired.model, wanted=0, floor=Level.COLD))

    return change


def evict_one(key: str, serial: int, serials: Collection[int], *, shrink: bool) -> DesiredChange:
    """Evict one replica, which is replaced; `shrink`: it is not, and one fewer is wanted. `serials`: of all
    replicas."""

    def change(before: DesiredModel | None) -> DesiredModel:
        desired = existing(key, before)
        model = desired.model
        least = model.replicas_min if model.floor is Level.HOT else 0
        if shrink and not model.wanted:
            raise UserError(f"none of {key} is wanted; leave --shrink out")
        if shrink and model.wanted <= least:
            raise UserError(f"{key} has {least} HOT replicas at least; leave --shrink out, or deploy it with --min")
        going = frozenset(one for one in (*model.going, serial) if one in serials)
        return structs.replace(desired, model=structs.replace(model, going=going, wanted=model.wanted - shrink))

    return change


def remove_model(key: str) -> DesiredChange:
    """Remove a model from the fleet, unless it is deployed again between two attempts to do so."""
    deployed_s: list[float] = []

    def change(before: DesiredModel | None) -> None:
        deployed_s.append(existing(key, before).at_unix_s)
        if deployed_s[-1] != deployed_s[0]:
            raise UserError(f"{key} was deployed again meanwhile, so it is not removed; run this again to remove it")

    return change


def undo_deploy(asked: DesiredModel, before: DesiredModel | None) -> DesiredChange:
    """Return to the state before a deploy, unless another model has the key since."""

    def change(now: DesiredModel | None) -> DesiredModel | None:
        return before if now is not None and now.name == asked.name else now

    return change


def check_name(desired: DesiredModel, others: Mapping[str, DesiredModel]) -> None:
    """Raise UserError if another model is served under the same name."""
    for key, other in others.items():
        if key != desired.model.key and other.name == desired.name:
            mend = f"give {desired.model.key} another name (--served-name, or modelName in a manifest)"
            mend += f", or `holdfast evict {key} --forget`"
            raise UserError(f"{key} is served as {desired.name!r} already; {mend}")
