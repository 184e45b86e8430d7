"""What should run, as a rollout sees it: a revision of a deployment, and of each service its set and how many. Pure.

A *set* is the replicas of one service that share one spec but for their number, and its id is that spec's hash. A
service that only works together with others (prefill and decode) names them as its *peers*: one of its replicas may be
paired with a peer's only if some revision has both their sets. So a peer that did not change is not replaced, and two
that both changed never meet across.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct, field

from holdfast.health.bounds import Count
from holdfast.spec.manifest.addresses import NO_DIGESTS, address_of, peers_of
from holdfast.spec.manifest.secrets import Digests
from holdfast.spec.manifest.types import FRONTEND, WORKER, Manifest
from holdfast.spec.names import canonical_hash

NOT_SCALED: Mapping[str, int] = MappingProxyType({})
NO_TRAFFIC_S = 10.0  # of frontends: new connections come to all of them alike, within seconds where any come at all

# The sets that serve together, by service, in order: of a service without peers its own alone.
Pair = tuple[tuple[str, str], ...]


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one service should be. Only another `set_id` replaces replicas."""

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
    """A deployment as it should be. Its number is larger than all before; two with the same number have the same sets,
    and may differ in counts and in how replicas are replaced."""

    number: Count
    parts: dict[str, Part]  # by service
    watch_s: float = 10.0  # all in place for so long before it counts as good

    def pair(self, service: str) -> Pair:
        """Return the sets that a replica of the service works with, its own among them."""
        names = sorted({service, *self.parts[service].peers} & set(self.parts))
        return tuple((name, self.parts[name].set_id) for name in names)

    def brings(self, before: Revision | None) -> bool:
        """Return whether it has a set that was not there before, or lacks one; else only counts change."""
        return before is None or self.sets != before.sets

    @property
    def digest(self) -> str:
        """Hash of all that a manifest asks for: two revisions with the same sets, in the same numbers and with the same
        rules for replacing them, have the same one."""
        fields = ("set_id", "replicas", "surge", "unavailable", "deadline_s", "errors_percent_max", "inexact", "paused")
        return canonical_hash({name: {key: getattr(part, key) for key in fields} for name, part in self.parts.items()})

    @property
    def sets_digest(self) -> str:
        """Hash of the sets alone: two revisions with the same one replace no replica."""
        return canonical_hash(self.sets)

    @property
    def sets(self) -> dict[str, str]:
        return {service: part.set_id for service, part in self.parts.items()}


def changes(before: Revision | None, after: Revision) -> list[str]:
    """Return what is different, a line for each service; none: nothing is."""
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


# -- from a manifest


def revision_of(
    manifest: Manifest, number: int, digests: Digests = NO_DIGESTS, scaled: Mapping[str, int] = NOT_SCALED
) -> Revision:
    """Return what the manifest asks for, as the revision of that number. `digests`: of the values of secrets; `scaled`:
    numbers of replicas that count in place of the manifest's, by service."""
    services = manifest.spec.services.items()
    counts = {name: scaled.get(name, service.replicas) for name, service in services}
    parts = {name: _part(manifest, name, digests, replicas) for name, replicas in counts.items()}
    return Revision(number=number, parts=parts)


def _part(manifest: Manifest, name: str, digests: Digests, replicas: int) -> Part:
    service = manifest.spec.services[name]
    rollout = service.rollout
    surge = amount(rollout.max_surge, replicas, up=True)
    unavailable = amount(rollout.max_unavailable, replicas, up=False)
    # Shares of few replicas may both come to none: then one more is started, and none is missed.
    surge = surge or int(not unavailable)
    plain, is_frontend = Part(set_id="", replicas=0), service.component_type == FRONTEND
    return Part(
        set_id=address_of(manifest, name, digests).hash8,
        replicas=replicas,
        # A lock of the manifest's own elects one engine of all that there are: a second replica would wait for ever.
        surge=0 if service.failover.lock else surge,
        unavailable=unavailable,
        deadline_s=rollout.progress_deadline_seconds,
        errors_percent_max=rollout.error_percent_max,
        no_traffic_s=NO_TRAFFIC_S if is_frontend else plain.no_traffic_s,
        # A frontend's answers cannot be handed over, so none of them ever is its set's last.
        last_drain_s=plain.last_drain_s if service.component_type == WORKER else plain.drain_s,
        inexact=rollout.inexact,
        paused=rollout.paused,
        peers=tuple(peers_of(manifest, name)),
    )


def amount(text: str, of: int, *, up: bool) -> int:
    """Return what a number or a share means for so many replicas; shares are rounded up or down, as a cluster does."""
    if not text.endswith("%"):
        return int(text)
    share = of * int(text[:-1])
    return -(-share // 100) if up else share // 100
