"""The desired state of one model: how many replicas, at which level, and where; and of one node. Plain data, checked
as it is made.

A replica is at one of three *levels*. HOT: on its devices, serving. WARM: its weights in host memory, its engine asleep
or gone. COLD: on disk, which is no replica any more. `wanted` is how many should be HOT now, as an operator or the
autoscaling says; the first `replicas_min` never go below `floor`.

The `generation` grows with every change, so that of two concurrent writers one learns that it would overwrite the
other; `version` is what runs, and a replica of another version is replaced.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from holdfast.health.bounds import Count, UnixS

REPLICAS_MAX = 10_000  # of one model: more is probably a mistake
DEVICES_MAX = 64  # of one replica, all on one node


class Level(IntEnum):
    """How near to a GPU the weights are; a higher one is nearer."""

    COLD = 0
    WARM = 1
    HOT = 2

    @property
    def word(self) -> str:
        """Return its name as commands show it."""
        return self.name


class Hysteresis(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long replicas stay as they are, so that the planner does not flap."""

    resident_s: float = 20.0  # HOT for so long at least: a copy there and back takes seconds, a load from disk a minute
    cooldown_s: float = 30.0  # HOT for so long before one of the same need evicts it: the length of a turn
    takeover_s: float = 20.0  # for a standby to lead, with its vault restarted: the slowest seen took 9 s
    linger_s: float = 600.0  # a surplus WARM replica is kept for so long, unless its memory is needed


HYSTERESIS = Hysteresis()


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model's desired state. ValueError lists all problems in one line."""

    key: str
    version: str = ""
    generation: Count = 0
    replicas_min: int = 0
    replicas_max: int = 1
    wanted: int = 0  # HOT, now
    floor: Level = Level.COLD  # below which the first `replicas_min` never fall
    dedicated: bool = False  # never evicted for other models
    going: frozenset[int] = frozenset()  # serials of replicas that an operator evicts
    nodes: frozenset[str] = frozenset()  # where it may be; none named: anywhere
    per_node_max: int = 0  # HOT replicas on a node; 0: as many as fit
    devices: int = 1  # of each replica, all on one node
    device_bytes: int  # on each of them, weights and KV
    host_bytes: int = 0  # when WARM
    reload_s: float = 0.0  # from disk, as measured; 0: not known
    load_s: float = 600.0  # within which one must have come up
    drain_s: float = 30.0  # within which requests may end before it goes

    def __post_init__(self) -> None:
        if wrong := problems(self):
            raise ValueError(f"model {self.key!r}: {'; '.join(wrong)}")

    @property
    def hot(self) -> int:
        """Return how many replicas must be HOT."""
        return max(self.wanted, self.replicas_min) if self.floor is Level.HOT else self.wanted

    @property
    def kept(self) -> int:
        """Return how many replicas must be HOT or WARM, on demand or by the floor."""
        return max(self.hot, self.floored)

    @property
    def floored(self) -> int:
        """Return how many replicas must be HOT or WARM without any demand."""
        return self.replicas_min if self.floor is not Level.COLD else 0

    def may_be_on(self, node: str) -> bool:
        return not self.nodes or node in self.nodes


class Cordon(Struct, frozen=True, kw_only=True):
    """The desired state of a node that takes no new replicas."""

    drain: bool = True  # the replicas that it has are replaced on other nodes; False: they stay
    at: UnixS = 0.0  # when it was written
    by: str = ""  # the user and machine that wrote it


def problems(model: Model) -> list[str]:
    """Return what is wrong with a model, one line each."""
    checks = (
        (bool(model.key) and model.key.isprintable(), "its key must be printable, and not empty"),
        (model.replicas_min >= 0, f"replicas_min is {model.replicas_min}, must be at least 0"),
        (
            model.replicas_min <= model.replicas_max <= REPLICAS_MAX,
            f"replicas_max is {model.replicas_max}, must be from replicas_min ({model.replicas_min}) to {REPLICAS_MAX}",
        ),
        (model.wanted >= 0, f"wanted is {model.wanted}, must be at least 0"),
        (
            model.wanted <= model.replicas_max,
            f"wanted is {model.wanted}, which is more than replicas_max ({model.replicas_max})",
        ),
        (1 <= model.devices <= DEVICES_MAX, f"devices is {model.devices}, must be from 1 to {DEVICES_MAX}"),
        (model.device_bytes > 0, f"device_bytes is {model.device_bytes}, must be at least 1: a lease is for bytes"),
        (model.host_bytes >= 0, f"host_bytes is {model.host_bytes}, must be at least 0"),
        (
            model.host_bytes > 0 or model.floor is not Level.WARM,
            "its floor is WARM, and host_bytes does not say how much that takes",
        ),
        (model.per_node_max >= 0, f"per_node_max is {model.per_node_max}, must be at least 0"),
        (model.reload_s >= 0, f"reload_s is {model.reload_s:g}, must be at least 0"),
        (model.load_s > 0, f"load_s is {model.load_s:g}, must be more than 0"),
        (model.drain_s >= 0, f"drain_s is {model.drain_s:g}, must be at least 0"),
    )
    return [text for fine, text in checks if not fine]
