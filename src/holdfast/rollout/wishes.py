"""From a checked manifest to the revision that a rollout is told, and what that is beside its memory. Pure.

Always true: what pods are told is in a part's set and nothing else is, so that a manifest that only counts or replaces
otherwise has the same sets, and takes over under the same number.
"""

from __future__ import annotations

from msgspec import structs

from holdfast.rollout.machine import RolloutPhase, RolloutState
from holdfast.rollout.records import DesiredDeployment
from holdfast.rollout.revision import Part, Revision
from holdfast.spec.manifest.addresses import NO_DIGESTS, address_of, peers_of
from holdfast.spec.manifest.secrets import Digests
from holdfast.spec.manifest.types import FRONTEND, WORKER, Manifest

SHUNNED_S = 10.0  # of frontends: new connections come to all of them alike, within seconds where any come at all


def revision_of(manifest: Manifest, number: int, digests: Digests = NO_DIGESTS) -> Revision:
    """What the manifest asks for, as the deployment's revision of that number; `digests`: of the values of secrets."""
    return Revision(number=number, parts={name: _part(manifest, name, digests) for name in manifest.spec.services})


def desired_revision(wanted: DesiredDeployment, manifest: Manifest) -> Revision:
    """What is wanted, as its manifest and a person's word have it. Who takes a deployment away waits for no stream's
    end but a drain's."""
    desired = revision_of(manifest, wanted.revision, wanted.secret_digests)
    parts = dict(desired.parts)
    for name, part in desired.parts.items():
        if wanted.deleted:
            parts[name] = structs.replace(part, replicas=0, paused=False, last_drain_s=part.drain_s)
        elif wanted.paused:
            parts[name] = structs.replace(part, paused=True)
    return structs.replace(desired, parts=parts)


def active_revision(desired: Revision, state: RolloutState) -> Revision:
    """The revision whose processes are started next: what is wanted, or, once that was undone, what it goes back to."""
    return state.target if state.undone and desired.number == state.desired_number else desired


def new_sets(desired: Revision, state: RolloutState, now_s: float) -> tuple[set[tuple[str, str]], float]:
    """The sets that the revision brings, and since when what happens to them is its own doing: one that is only now
    heard of has done nothing yet."""
    before = state.stable.sets.items() if state.stable is not None else set()
    return desired.sets.items() - before, state.began_s if desired.number <= state.desired_number else now_s


def is_gone(wanted: DesiredDeployment, state: RolloutState) -> bool:
    """Whether a deployment that was deleted has nothing left here."""
    known = state.desired_number == wanted.revision
    return wanted.deleted and known and state.phase is RolloutPhase.STEADY and not state.replicas


def _part(manifest: Manifest, name: str, digests: Digests) -> Part:
    service = manifest.spec.services[name]
    rollout, replicas = service.rollout, service.replicas
    surge = amount(rollout.max_surge, replicas, up=True)
    unavailable = amount(rollout.max_unavailable, replicas, up=False)
    # Shares of few replicas may both come to none: then one more is started, and nobody is missed.
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
        no_traffic_s=SHUNNED_S if is_frontend else plain.no_traffic_s,
        # A frontend's answers cannot be handed over, so none of them ever is its set's last.
        last_drain_s=plain.last_drain_s if service.component_type == WORKER else plain.drain_s,
        inexact=rollout.inexact,
        paused=rollout.paused,
        peers=tuple(peers_of(manifest, name)),
    )


def amount(text: str, of: int, *, up: bool) -> int:
    """What a number or a share means for so many replicas; shares are rounded up or down, as a cluster does."""
    if not text.endswith("%"):
        return int(text)
    share = of * int(text[:-1])
    return -(-share // 100) if up else share // 100
