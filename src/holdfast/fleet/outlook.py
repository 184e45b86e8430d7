"""Says why a model misses a replica, in words for waiting clients, and whether waiting helps. Pure.

The planner says that there is no room, or that a start failed. Waiting helps for room that others have; not for more
room than any node has, nor where the model has failed to start several times in a row, until it is tried again. Lost
nodes count as if they were there: they may come back. A replica that only a floor of WARM misses is shown as missing,
and never makes a model hopeless for waiting requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from holdfast.fleet.actions import Tries
from holdfast.fleet.desired import Model
from holdfast.fleet.observed import Node
from holdfast.spec.engines import GIB

FAILED_MAX = 3  # in a row: the next would end the same
NO_NODE = "no node is there"


class ModelOutlook(Struct, frozen=True):
    """Why a replica is missing; `hopeless`: the model cannot be placed with the current nodes; `stands`: replicas are
    up and do not serve, and no other comes."""

    why: str
    hopeless: bool = False
    stands: bool = False


def too_large(nodes: Iterable[Node], model: Model) -> str:
    """Return why these nodes could not hold the desired replicas if they were empty; "": they could, or there is
    none."""
    mine = [node for node in nodes if model.may_be_on(node.name)]
    room = sum(_holds(node, model) for node in mine)
    if not mine:
        return ""
    if room >= model.hot:
        return _host_too_small(mine, model)
    size = f"{model.device_bytes / GIB:.2f} GiB"
    each = size if model.devices == 1 else f"{model.devices} devices with {size} each"
    if room:
        return f"{model.hot} replicas are desired, and all nodes together could hold {room}, of {each}"
    most = max((memory.total_bytes for node in mine for memory in node.devices.values()), default=0)
    return f"each replica needs {each}, and no node has that: the largest device has {most / GIB:.2f} GiB"


def _host_too_small(nodes: list[Node], model: Model) -> str:
    """Return why these nodes' host memory could not hold what a floor keeps there; "": it could."""
    warm, room = model.floored - model.hot, sum(_hosts(node, model) for node in nodes)
    if warm <= room:
        return ""
    size = f"{model.host_bytes / GIB:.2f} GiB"
    if room:
        return f"{warm} are to be WARM, and the host memory of all nodes together could hold {room}, of {size}"
    most = max(node.host.total_bytes for node in nodes) / GIB
    return f"each WARM replica needs {size} of host memory, and no node has that: the most is {most:.2f} GiB"


def _hosts(node: Node, model: Model) -> int:
    """Return how many WARM replicas a node holds; they are loaded by way of its devices."""
    return node.host.total_bytes // max(1, model.host_bytes) if _holds(node, model) else 0


def _holds(node: Node, model: Model) -> int:
    totals = [memory.total_bytes for memory in node.devices.values()]
    fits = sum(total >= model.device_bytes for total in totals) >= model.devices
    most = sum(total // model.device_bytes for total in totals) // model.devices if fits else 0
    return min(most, model.per_node_max) if model.per_node_max else most


def start_failed(tries: Tries, last: str) -> ModelOutlook:
    """Return the outlook of a model whose start failed, and that backs off. `last`: the reason, if known."""
    count = "" if tries.failed == 1 else f" {tries.failed} times"
    return ModelOutlook(f"it failed to start{count}" + (f": {last}" if last else ""), tries.failed >= FAILED_MAX)


def unhealthy_outlook(trouble: str, missing: ModelOutlook | None, is_coming: bool) -> ModelOutlook:
    """Return what to tell clients of a model whose replicas are up and do not serve.

    `missing`: why no other comes; then clients wait as long as streams are held, since a replica may serve again."""
    if is_coming:
        return ModelOutlook(f"{trouble}; another is being started")
    if missing is None:
        return ModelOutlook(f"{trouble}; another is started unless it serves again soon")
    return ModelOutlook(f"{trouble}; no other comes: {missing.why}", stands=True)


class NodeKinds:
    """The kinds of nodes of a fleet: of two thousand alike one is looked at."""

    def __init__(self, nodes: Mapping[str, Node], cordons: Collection[str] = ()) -> None:
        self._nodes, self._cordons = nodes, cordons
        self._is_any_there = any(node.alive for node in nodes.values())
        kinds = {(name in cordons, *_shape(node)): node for name, node in nodes.items()}
        self._alike = list(kinds.values())

    def without_room(self, model: Model, why: str) -> ModelOutlook:
        """Return the outlook of a model for which there is no room; `why`: in the planner's words."""
        nodes, none = self._for(model)
        fitting = [node.name for node in nodes if _holds(node, model)]
        if none or fitting:
            return ModelOutlook(none or self._if_drained(fitting) or why)
        return ModelOutlook(too_large(nodes, model) or why, hopeless=True)

    def without_host(self, model: Model, why: str) -> ModelOutlook:
        """Return the outlook of a model whose floor of WARM no host has memory for."""
        nodes, none = self._for(model)
        fitting = [node.name for node in nodes if _hosts(node, model)]
        if none or fitting:
            return ModelOutlook(none or self._if_drained(fitting) or why)
        return ModelOutlook(_host_too_small(nodes, model) or why)

    def _if_drained(self, fitting: list[str]) -> str:
        """Return the reason if all nodes that could hold a replica are drained; "": another could."""
        names = [name for name in fitting if name in self._cordons]
        return f"only drained nodes could hold it: {', '.join(names)}" if len(names) == len(fitting) else ""

    def _for(self, model: Model) -> tuple[list[Node], str]:
        """Return the nodes that a model may be on, or one of each kind; and why none of them is there, if none is."""
        if not self._is_any_there:
            return [], NO_NODE
        named = [self._nodes[name] for name in sorted(model.nodes) if name in self._nodes]
        if model.nodes and not any(node.alive for node in named):
            return [], f"none of the nodes that it may be on is there: {', '.join(sorted(model.nodes))}"
        return named if model.nodes else self._alike, ""


def _shape(node: Node) -> tuple[int, ...]:
    return node.host.total_bytes, *sorted(one.total_bytes for one in node.devices.values())
