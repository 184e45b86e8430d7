"""A deployment as `holdfast get` shows it: a row for people, an object for programs. Pure.

A row needs no manifest, so that what reads one is loaded for objects only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from holdfast.cli.deployments.book import Seen
from holdfast.cli.terminal import Cell
from holdfast.rollout.status import RolloutResult, rollout_result
from holdfast.spec.settings import about

FORMATS = ("yaml", "json", "name")
Format = Annotated[str | None, about("Output format, for programs.", flag="--output", short="-o", choices=FORMATS)]
TITLES = ("name", "revision", "status", "ready", "age")
STATES = {
    RolloutResult.DONE: "in place",
    RolloutResult.UNDER_WAY: "rolling out",
    RolloutResult.PAUSED: "paused",
    RolloutResult.UNDONE: "undone",
    RolloutResult.STUCK: "stuck",
}
UNHEARD = "not carried out"
UNWELL = "unwell"  # in place, and one of its replicas is in trouble
GOOD, BAD = ("in place",), ("stuck", "undone", UNHEARD, UNWELL)


def name_of(name: str) -> str:
    """As kubectl calls it (`Manifest.__str__`)."""
    return f"dynamographdeployment.nvidia.com/{name}"


def state_of(seen: Seen) -> str:
    if seen.supervisor is None:
        return UNHEARD
    if seen.wanted.deleted:
        return "being deleted"
    if seen.supervisor.trouble:
        return "stuck"
    if seen.report is not None and seen.report.is_unwell:
        return UNWELL
    if seen.report is None or (seen.report.state is RolloutResult.DONE and not seen.report.is_done):
        return STATES[RolloutResult.UNDER_WAY]
    return STATES.get(seen.report.state, seen.report.state)  # as it is, if a newer version wrote it


def row(seen: Seen, now_s: float) -> list[Cell]:
    state = state_of(seen)
    colour = "green" if state in GOOD else "red" if state in BAD else "yellow"
    services = seen.report.services if seen.report is not None else ()
    ready = f"{sum(one.new for one in services)}/{sum(one.wanted for one in services)}" if services else ""
    return [
        (seen.name, ""),
        (str(seen.wanted.revision), ""),
        (state, colour),
        (ready, ""),
        (age(now_s - seen.wanted.at_unix_s), ""),
    ]


def age(seconds: float) -> str:
    """In the largest unit of which there are two."""
    whole = max(0, round(seconds))
    units = ((86_400, "d"), (3600, "h"), (60, "m"))
    return next((f"{whole // unit_s}{name}" for unit_s, name in units if whole >= 2 * unit_s), f"{whole}s")


def as_object(seen: Seen) -> dict[str, Any]:
    """The manifest as it was asked for, with what became of it in `status`."""
    from holdfast.spec.manifest.yaml_text import plain

    status: dict[str, Any] = {"revision": seen.wanted.revision, "state": state_of(seen)}
    memory = seen.memory
    if seen.wanted.scaled:
        status["scaled"] = seen.wanted.scaled  # in place of the manifest's numbers
    if seen.report is not None:
        status["message"] = seen.report.headline
        status["services"] = {one.name: _service(one) for one in seen.report.services}
    elif seen.unheard:
        status["message"] = seen.unheard
        status["lastState"] = STATES[rollout_result(memory)]
    if memory.stable is not None:
        status["revisionInPlace"] = memory.stable.number
    if seen.supervisor is not None:
        status["steward"] = str(seen.supervisor)
    return {**plain(seen.wanted.manifest), "status": status}


def _service(one: Any) -> dict[str, Any]:
    waits = {"waitsFor": one.waits_for} if one.waits_for else {}
    return {"replicas": one.wanted, "ready": one.new, "earlier": one.old, "there": one.there, **waits}


def written(found: Sequence[dict[str, Any]], form: str, *, is_list: bool) -> str:
    """As `-o yaml` or `-o json` has them."""
    from holdfast.spec.manifest.yaml_text import in_yaml

    said: Any = {"apiVersion": "v1", "kind": "List", "items": list(found)} if is_list else found[0]
    if form == "yaml":
        return in_yaml(said)
    return msgspec.json.format(msgspec.json.encode(said), indent=2).decode() + "\n"
