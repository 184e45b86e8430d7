"""What should run, as a rollout sees it: a revision of a deployment, and of each service its set and how many. Pure.

A *set* is the replicas of one service that share one spec but for their number, and its id is that spec's hash. A
service that only works together with others (prefill and decode) names them as its *mates*: one of its replicas may be
paired with a mate's only if some revision has both their sets. So a mate that did not change is not replaced, and two
that both changed never meet across.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.health.bounds import Count
from holdfast.spec.names import canonical_hash

# The sets that serve together, by service, in order: of a service without mates its own alone.
Pair = tuple[tuple[str, str], ...]


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one service should be. Only another `set_id` replaces anybody."""

    set_id: str
    replicas: Count
    surge: Count = 1  # replicas beyond those wanted, while it rolls
    unavailable: Count = 0  # of those wanted, which may be missing meanwhile
    deadline_s: float = 600.0  # without progress for so long, it is undone
    errors_percent_max: int = 5  # of a new set's requests; with more that fail, it is undone
    # A new set that is on trial and got no request for so long is not waited for: clients keep their connections to the
    # old ones, and come only when those leave. 60.0: as long as any trial (`trial.TRIAL_S`).
    no_traffic_s: float = field(default=60.0, name="shunned_s")
    # How long streams have to end or to be handed over, before their replica is stopped and they are resumed:
    drain_s: float = 30.0  # where others of its set can take them
    last_drain_s: float = 600.0  # where none is left that could, so that they must end there or go on inexactly
    swap_drain_s: float = 5.0  # where it gives up its place to another, and new requests are held meanwhile
    inexact: bool = False  # whether streams whose set is gone for good may end on another
    paused: bool = False
    peers: tuple[str, ...] = field(default=(), name="mates")

    def __post_init__(self) -> None:
        if self.replicas < 0 or self.surge < 0 or self.unavailable < 0:
            raise ValueError("there is no negative number of replicas")


class Revision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment as it should be. Its number is larger than all before; whatever has the same number has the same
    sets, and may differ in how many there are and how they are replaced."""

    number: Count
    parts: dict[str, Part]  # by service
    watch_s: float = 10.0  # all in place for so long before it counts as good

    def pair(self, service: str) -> Pair:
        """The sets that a replica of the service works with, its own among them."""
        names = sorted({service, *self.parts[service].peers} & set(self.parts))
        return tuple((name, self.parts[name].set_id) for name in names)

    def brings(self, before: Revision | None) -> bool:
        """Whether it has a set that was not there before, or lacks one; else only numbers change."""
        return before is None or self.sets != before.sets

    @property
    def digest(self) -> str:
        """Hash of all that a manifest asks for: two revisions with the same sets, in the same numbers and with the same
        rules for replacing them, have the same one."""
        fields = ("set_id", "replicas", "surge", "unavailable", "deadline_s", "errors_percent_max", "inexact", "paused")
        return canonical_hash({name: {key: getattr(part, key) for key in fields} for name, part in self.parts.items()})

    @property
    def sets(self) -> dict[str, str]:
        return {service: part.set_id for service, part in self.parts.items()}


def changes(before: Revision | None, after: Revision) -> list[str]:
    """What is different, a line for each service; none: nothing is."""
    old = before.parts if before is not None else {}
    lines = []
    for name in sorted(old.keys() | after.parts.keys()):
        was, is_now = old.get(name), after.parts.get(name)
        if was is None and is_now is not None:
            lines.append(f"{name}: new, {is_now.replicas} of {is_now.set_id}")
        elif is_now is None:
            lines.append(f"{name}: removed")
        elif was is not None and was.set_id != is_now.set_id:
            lines.append(f"{name}: {was.replicas} of {was.set_id} become {is_now.replicas} of {is_now.set_id}")
        elif was is not None and was.replicas != is_now.replicas:
            lines.append(f"{name}: {was.replicas} become {is_now.replicas}, of the same set")
    return lines
