"""What frontends route by during a deployment's rollouts: a record of its own, beside the rollout's state.

The rollout's state belongs to the supervisor, whose version alone can read it. What frontends need of it is written as
`TrafficRecord` under `TRAFFIC`, after the state and before anything is started or stopped, so that nothing is stopped
that frontends still use. Fields are only added, and unknown ones are ignored.

Always true: a traffic record names the state that it was made from. It counts where that is the state in the store, or
where the state cannot be read; else an older supervisor, which writes no traffic record, wrote the state, and the state
itself is read. So a record that a newer supervisor left behind never counts after its time.
"""

from __future__ import annotations

import hashlib
from itertools import chain

import msgspec
from msgspec import Struct

from holdfast.rollout import machine
from holdfast.rollout.machine import DESIRED_RUNNING, DesiredState, RolloutState
from holdfast.spec.names import namespace_of, pod_name

_encode = msgspec.json.Encoder(order="deterministic").encode  # sets too: equal records are equal bytes


class RolloutRouting(Struct, frozen=True):
    """What a rollout tells frontends: pods by name, sets by namespace."""

    idle: tuple[str, ...] = ()  # pods that get no work: they leave, or stand by
    staying: frozenset[str] = frozenset()  # sets with a replica that has counted and serves, or drains
    kept: frozenset[str] = frozenset()  # all sets that may have workers, now or again: others are gone for good
    inexact: frozenset[str] = frozenset()  # sets in which streams of those may end


class TrafficRecord(Struct, frozen=True, kw_only=True):
    """The record under `TRAFFIC`."""

    made_from: str = ""  # hash of the state's bytes
    routing: RolloutRouting = RolloutRouting()


def encode_traffic(name: str, state: RolloutState, written: bytes) -> bytes:
    """Return the traffic record of a deployment's state. `written`: the state's bytes in the store."""
    return _encode(TrafficRecord(made_from=_hash(written), routing=routing_of(name, state)))


def read_routing(name: str, state: bytes, traffic: bytes = b"") -> RolloutRouting | None:
    """Return what frontends route by, from the store's rollout state and traffic record; b"": nothing is written. None:
    neither can be read, and the reader continues as before."""
    record = _decode(traffic)
    if record is not None and record.made_from == _hash(state):
        return record.routing
    try:
        return routing_of(name, machine.decode(state) if state else machine.NOTHING)
    except (msgspec.DecodeError, ValueError):
        return record.routing if record is not None and record.made_from else None


def routing_of(name: str, state: RolloutState) -> RolloutRouting:
    replicas, parts = state.replicas, state.target.parts.values()
    idle = [(one, which) for which, one in replicas.items() if one.desired is not DesiredState.SERVE]
    there = [
        one.set_id
        for one in replicas.values()
        if one.desired is DesiredState.DRAIN or (one.desired in DESIRED_RUNNING and one.counted)
    ]
    known = [revision.sets.values() for revision in (state.target, state.stable) if revision is not None]
    kept = {*chain(*known), *(one.set_id for one in replicas.values())}
    return RolloutRouting(
        tuple(f"{pod_name(name, one.service, one.set_id)}-{which.rpartition('-')[2]}" for one, which in idle),
        frozenset(namespace_of(name, set_id) for set_id in there),
        frozenset(namespace_of(name, set_id) for set_id in kept),
        frozenset(namespace_of(name, part.set_id) for part in parts if part.inexact),
    )


def _hash(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()


def _decode(data: bytes) -> TrafficRecord | None:
    try:
        return msgspec.json.decode(data, type=TrafficRecord) if data else None
    except (msgspec.DecodeError, ValueError):
        return None
