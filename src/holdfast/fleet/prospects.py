"""Why a model misses somebody, in words for who waits for it, and whether it will not come by itself. Pure.

Theory. The planner says that there is no room, or that a start failed. Whether waiting helps is another question: for
room that others have it does; for more room than any node has it does not, nor where it has failed to start several
times in a row, until it is tried again. Nodes that are lost count as if they were there: they may come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from holdfast.fleet.actions import Tries
from holdfast.fleet.desired import Model
from holdfast.fleet.observed import Node
from holdfast.spec.engines import GIB

FAILED_MAX = 3  # in a row: the next would end the same
NO_NODE = "no node is there"


class Prospect(Struct, frozen=True):
    """Why somebody is missing; `hopeless`: whoever waits for the first one does so in vain, as things are."""

    why: str
    hopeless: bool = False


def too_large(nodes: Iterable[Node], model: Model) -> str:
    """Why these nodes could not hold what is wanted, were they empty; "": they could, or none is there."""
    mine = [node for node in nodes if model.may_be_on(node.name)]
    room = sum(_holds(node, model) for node in mine)
    if not mine or room >= model.hot:
        return ""
    size = f"{model.device_bytes / GIB:.2f} GiB"
    each = size if model.devices == 1 else f"{model.devices} devices with {size} each"
    if room:
        return f"{model.hot} are wanted, and all nodes together could hold {room}, of {each}"
    most = max((memory.total_bytes for node in mine for memory in node.devices.values()), default=0)
    return f"each replica needs {each}, and no node has that: the largest device has {most / GIB:.2f} GiB"


def _holds(node: Node, model: Model) -> int:
    totals = [memory.total_bytes for memory in node.devices.values()]
    fits = sum(total >= model.device_bytes for total in totals) >= model.devices
    most = sum(total // model.device_bytes for total in totals) // model.devices if fits else 0
    return min(most, model.per_node_max) if model.per_node_max else most


def failed(tries: Tries, last: str) -> Prospect:
    """It is not tried again at once, since starting it failed. `last`: what of, if anybody said so."""
    count = "" if tries.failed == 1 else f" {tries.failed} times"
    return Prospect(f"it failed to start{count}" + (f": {last}" if last else ""), tries.failed >= FAILED_MAX)


class Shapes:
    """What kinds of nodes there are: of two thousand alike one is looked at."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._is_any_there = any(node.alive for node in nodes.values())
        kinds = {tuple(sorted(one.total_bytes for one in node.devices.values())): node for node in nodes.values()}
        self._alike = list(kinds.values())

    def without_room(self, model: Model, why: str) -> Prospect:
        """There is none for it; `why`: as the planner says it."""
        if not self._is_any_there:
            return Prospect(NO_NODE)
        named = [self._nodes[name] for name in sorted(model.nodes) if name in self._nodes]
        if model.nodes and not any(node.alive for node in named):
            return Prospect(f"none of the nodes that it may be on is there: {', '.join(sorted(model.nodes))}")
        nodes = named if model.nodes else self._alike
        if any(_holds(node, model) for node in nodes):
            return Prospect(why)
        return Prospect(too_large(nodes, model) or why, hopeless=True)
