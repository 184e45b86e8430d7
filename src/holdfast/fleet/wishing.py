"""From a manifest's worker service to what a fleet is asked for, and from one wish to the next. Pure.

Always true: what is asked for anew is asked for whole, but for what nobody said and others found out: how many are
wanted now, and how long a load takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import structs

from holdfast.core.errors import UserError
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.records import Change, Wish, there
from holdfast.fleet.scaling import Scaling
from holdfast.spec.engines import GIB
from holdfast.spec.manifest.fleet import Autoscale
from holdfast.spec.manifest.types import Service

LEVELS = {"hot": Level.HOT, "warm": Level.WARM, "cold": Level.COLD}


def model_of(key: str, service: Service, version: str, needed_bytes: int) -> Model:
    """What is wanted of a worker service. `needed_bytes`: on each device, where the manifest does not say; ValueError,
    if that is not known either."""
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


def scaling_of(autoscale: Autoscale) -> Scaling | None:
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


def deployed(asked: Wish, *, counts: bool) -> Change:
    """As it is asked for now. `counts`: also how many; else as many as before, within its bounds."""

    def change(before: Wish | None) -> Wish:
        if before is None:
            return asked
        model = structs.replace(asked.model, generation=before.model.generation, going=before.model.going)
        if not counts:
            least = model.replicas_min if model.floor is Level.HOT else 0
            model = structs.replace(model, wanted=min(max(before.model.wanted, least), model.replicas_max))
        if model.version == before.model.version:
            model = structs.replace(model, reload_s=before.model.reload_s)
        after = structs.replace(asked, model=model)
        # Of one version a text may differ in remarks, and in numbers that the model has.
        same = structs.replace(after, manifest=before.manifest, at_unix_s=before.at_unix_s)
        return before if same == before else after

    return change


def evicted(key: str) -> Change:
    """None of it is wanted and none is kept; what it is stays known, and more can be asked for."""

    def change(before: Wish | None) -> Wish:
        wish = there(key, before)
        return structs.replace(wish, model=structs.replace(wish.model, wanted=0, floor=Level.COLD))

    return change


def one_evicted(key: str, serial: int, serials: Collection[int], *, shrink: bool) -> Change:
    """One replica is to go, and another to come for it; `shrink`: one fewer is wanted. `serials`: of all there are."""

    def change(before: Wish | None) -> Wish:
        wish = there(key, before)
        model = wish.model
        least = model.replicas_min if model.floor is Level.HOT else 0
        if shrink and not model.wanted:
            raise UserError(f"none of {key} is wanted; leave --shrink out")
        if shrink and model.wanted <= least:
            raise UserError(f"{key} has {least} HOT replicas at least; leave --shrink out, or deploy it with --min")
        going = frozenset(one for one in (*model.going, serial) if one in serials)
        return structs.replace(wish, model=structs.replace(model, going=going, wanted=model.wanted - shrink))

    return change


def forgotten(key: str) -> Change:
    """It is not known any more, unless somebody deploys it between two tries to say so."""
    deployed_s: list[float] = []

    def change(before: Wish | None) -> None:
        deployed_s.append(there(key, before).at_unix_s)
        if deployed_s[-1] != deployed_s[0]:
            raise UserError(f"{key} was deployed again meanwhile, so it is not removed; run this again to remove it")

    return change


def undone(asked: Wish, before: Wish | None) -> Change:
    """As it was before that was asked for, unless somebody asked for something else since."""

    def change(now: Wish | None) -> Wish | None:
        return before if now is not None and now.name == asked.name else now

    return change


def check_name(wish: Wish, others: Mapping[str, Wish]) -> None:
    """UserError, if clients could not tell it from another by its name."""
    for key, other in others.items():
        if key != wish.model.key and other.name == wish.name:
            mend = f"give {wish.model.key} another name (--served-name, or modelName in a manifest)"
            mend += f", or `holdfast evict {key} --forget`"
            raise UserError(f"{key} is served as {wish.name!r} already; {mend}")
