"""What stands in the store of a fleet: wishes, nodes, what is asked of each, and what its controller must not forget.

A person's command writes wishes and nothing else. A node's agent writes its own record, leased, whole and in order. The
one controller writes what it asks of a node and, before that, its *book*: the serials it has used, what failed, and,
for frontends, who gets no new work and why a model does not come.

Always true: a wish is changed only from what was read, so that of two who ask at once the second sees what the first
asked for. Orders and book are written by one: who finds another's where its own should be asks for nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct, structs

from holdfast.core.errors import UserError
from holdfast.discovery.keys import FLEETS, MODELS, NODES, ORDERS
from holdfast.fleet.actions import Action, Tries
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Node, Replica
from holdfast.fleet.scaling import Scaling
from holdfast.health.bounds import Count, UnixS
from holdfast.spec.names import pod_name
from holdfast.store.contract import Store, update_record

TIMEOUT_S = 10.0  # of one call: a store that restarts is back in a second or two


class Wish(Struct, frozen=True, kw_only=True):
    """A model that is to be served, as it was last asked for."""

    name: str  # by which clients ask for it
    model: Model
    manifest: str  # its text: one worker service, called as the model's key is
    scaling: Scaling | None = None  # None: as many as a person says
    at_unix_s: UnixS = 0.0


class NodeRecord(Struct, frozen=True, kw_only=True):
    """A node at one moment, by its agent."""

    node: Node
    replicas: tuple[Replica, ...] = ()
    # Of those asked of it that still stand in its orders: what came of each. "": it is done.
    answers: Mapping[str, str] = {}
    number: Count = 0  # of this record, by this agent
    at_unix_s: UnixS = 0.0  # when it was told; 0: nobody says
    again_s: float = 0.0  # within which it is told again though nothing changed; 0: it is not
    pid: int = 0
    host: str = ""
    processes: Mapping[str, tuple[str, ...]] = {}  # of each replica, by its name, as `holdfast status` calls them


class Orders(Struct, frozen=True, kw_only=True):
    """What is asked of one node, and not known to be done."""

    by: str = ""  # the controller
    actions: tuple[Action, ...] = ()
    overdue: frozenset[str] = frozenset()  # ids of those whose time is over


class Book(Struct, frozen=True, kw_only=True):
    """What a controller must not forget, who gets nothing new, and who is missing."""

    by: str = ""
    serials: Mapping[str, int] = {}
    tries: Mapping[str, Tries] = {}
    idle: tuple[str, ...] = ()  # replicas' processes, as their workers are called, without an engine's suffix
    unmet: Mapping[str, str] = {}  # models that miss somebody, and why
    hopeless: tuple[str, ...] = ()  # of those: who waits for the first one does so in vain, as things are
    lost: tuple[str, ...] = ()  # nodes that did not report in time: what they last told does not count
    stands: tuple[str, ...] = ()  # of those: replicas are up, none serves, and no other comes
    whys: Mapping[str, str] = {}  # models that failed to start, and why they last did


T = TypeVar("T", Wish, NodeRecord, Orders, Book)
Change = Callable[[Wish | None], Wish | None]


def wish_key(deployment: str, model: str) -> str:
    return f"{MODELS}{deployment}/{model}"


def node_key(deployment: str, node: str) -> str:
    return f"{NODES}{deployment}/{node}"


def orders_key(deployment: str, node: str) -> str:
    return f"{ORDERS}{deployment}/{node}"


def book_key(deployment: str) -> str:
    return FLEETS + deployment


def process_name(deployment: str, model: str, version: str, serial: int) -> str:
    """What a replica's worker is called, before an engine's suffix."""
    return f"{pod_name(deployment, model, version)}-{serial}"


def read(kind: type[T], key: str, data: bytes) -> T:
    """UserError, if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"the store's {key} cannot be read: {error}") from error


def read_all(kind: type[T], prefix: str, values: Mapping[str, bytes]) -> dict[str, T]:
    """Of all keys under a prefix those that can be read, by what follows it."""
    found = {}
    for key, data in values.items():
        if key.startswith(prefix):
            try:
                found[key.removeprefix(prefix)] = msgspec.json.decode(data, type=kind)
            except (msgspec.DecodeError, ValueError):
                continue
    return found


# -- wishes, from what was wished for before


async def ask(store: Store, deployment: str, key: str, change: Change) -> Wish | None:
    """Change what is wanted of a model, from whatever that is at this moment; what it is then."""
    where = wish_key(deployment, key)

    def next_generation(held: bytes | None) -> bytes | None:
        before = None if held is None else read(Wish, where, held)
        after = change(before)
        if after is None or after == before:
            return None if after is None else held
        generation = before.model.generation + 1 if before is not None else 1
        return msgspec.json.encode(structs.replace(after, model=structs.replace(after.model, generation=generation)))

    value, _ = await update_record(store, where, next_generation, TIMEOUT_S)
    return None if value is None else read(Wish, where, value)


def scaled(key: str, wanted: int) -> Change:
    """So many HOT ones, by a person's word; within its bounds."""

    def change(before: Wish | None) -> Wish:
        wish = there(key, before)
        least = wish.model.replicas_min if wish.model.floor is Level.HOT else 0
        most = wish.model.replicas_max
        if wanted > most:
            raise UserError(f"{key} has {most} replicas at most; deploy it with --max {wanted} for more")
        if wanted < least:
            raise UserError(f"{key} has {least} HOT replicas at least; deploy it with --min {wanted} for fewer")
        return structs.replace(wish, model=structs.replace(wish.model, wanted=wanted))

    return change


def there(key: str, before: Wish | None) -> Wish:
    if before is None:
        raise UserError(f"there is no model {key!r}; `holdfast get models` shows those that there are")
    return before
