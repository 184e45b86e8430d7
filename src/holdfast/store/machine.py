"""Decides for the embedded store: keyspace, leases, watches. No I/O, no clock; calls return what to send.

A key is *durable* (owner None) or *leased* (owner: the connection that put it last). When a connection closes, exactly
the keys it still owns are removed, so a client that has already registered them on a new connection loses none. Every
change goes to every watch with a matching prefix, in the order of the changes. A watch on a *blocked* connection (the
receiver does not read) gets no changes and becomes *stale*; it gets a new snapshot once the connection is unblocked, so
a slow receiver costs the store no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.store import messages as m
from holdfast.store.contract import check_key, check_prefix, check_value
from holdfast.wire.connection import NO_HELLO, WRONG_VERSION, Refused


@dataclass(frozen=True, slots=True)
class StoreLimits:
    keys_max: int = 65_536  # thousands of workers with a dozen keys each
    bytes_max: int = 64 * 1024 * 1024  # keys and values together; discovery needs under 1 MiB
    watches_per_connection_max: int = 256  # a client holds 64; the rest is for watches being replaced


DEFAULT_LIMITS = StoreLimits()


@dataclass(frozen=True, slots=True)
class Send:
    connection: int
    message: m.ToClient


@dataclass(frozen=True, slots=True)
class Effects:
    """Messages to send: `sends` now, `after_save` only once the current durable keys are on disk."""

    sends: list[Send] = field(default_factory=list)
    after_save: list[Send] = field(default_factory=list)


@dataclass(slots=True)
class _Entry:
    value: bytes
    owner: int | None


@dataclass(slots=True)
class _Watch:
    prefix: str
    stale: bool = False


@dataclass(slots=True)
class _Connection:
    greeted: bool = False
    blocked: bool = False
    owned: set[str] = field(default_factory=set)
    watches: dict[int, _Watch] = field(default_factory=dict)


class StoreMachine:
    """The store's state; the server owns the sockets and the file."""

    def __init__(self, durable: dict[str, bytes], limits: StoreLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._entries = {key: _Entry(value, None) for key, value in durable.items()}
        self._bytes = sum(_size(key, value) for key, value in durable.items())
        self._connections: dict[int, _Connection] = {}

    def __repr__(self) -> str:
        watches = sum(len(connection.watches) for connection in self._connections.values())
        return (
            f"{len(self._entries)} keys, {self._bytes} bytes, {len(self._connections)} connections, {watches} watches"
        )

    def durable_items(self) -> dict[str, bytes]:
        return {key: entry.value for key, entry in self._entries.items() if entry.owner is None}

    def connect(self, connection: int) -> None:
        assert connection not in self._connections
        self._connections[connection] = _Connection()

    def disconnect(self, connection: int) -> Effects:
        """Remove a connection and the keys that it still owns: its lease is over."""
        gone = self._connections.pop(connection)
        effects = Effects()
        for key in sorted(gone.owned):
            self._remove(key, effects)
        return effects

    def block(self, connection: int) -> None:
        """Send no changes to a connection's watches until `unblock`: the receiver does not read."""
        self._connections[connection].blocked = True

    def unblock(self, connection: int) -> None:
        self._connections[connection].blocked = False

    def refresh(self, connection: int) -> Effects:
        """Return a snapshot for one stale watch of an unblocked connection; no sends if none is stale."""
        state = self._connections[connection]
        for number, watch in state.watches.items():
            if watch.stale and not state.blocked:
                watch.stale = False
                return Effects(self._snapshot(connection, number, watch.prefix))
        return Effects()

    def handle(self, connection: int, message: m.ToServer) -> Effects:
        """Handle one message of a client. A `Refused` among the sends means: close that connection."""
        state = self._connections[connection]
        if isinstance(message, m.Hello):
            return self._greet(connection, state, message)
        if not state.greeted:
            return _refuse(connection, NO_HELLO, "the first message must be Hello")
        try:
            return _HANDLERS[type(message)](self, connection, message)
        except ValueError as error:
            return _refuse(connection, "InvalidRequest", str(error))

    def _greet(self, connection: int, state: _Connection, hello: m.Hello) -> Effects:
        version = m.VERSIONS.agree(hello)
        if version is None:
            return _refuse(connection, WRONG_VERSION, m.VERSIONS.refusal(hello, "this store"))
        if state.greeted:
            return _refuse(connection, "InvalidRequest", "Hello was said already")
        state.greeted = True
        return Effects([Send(connection, m.Welcome(version, m.VERSIONS.common_features(hello)))])

    def _ping(self, connection: int, _: m.Ping) -> Effects:
        return Effects([Send(connection, m.Pong())])

    def _get(self, connection: int, message: m.Get) -> Effects:
        entry = self._entries.get(message.key)
        return Effects([Send(connection, m.Value(message.call, entry.value if entry else None))])

    def _put(self, connection: int, message: m.PutKey) -> Effects:
        check_key(message.key)
        check_value(message.value)
        entry = self._entries.get(message.key)
        grown = _size(message.key, message.value) - (_size(message.key, entry.value) if entry else 0)
        if (entry is None and len(self._entries) >= self._limits.keys_max) or (
            grown > 0 and self._bytes + grown > self._limits.bytes_max
        ):
            reason = f"the store is full ({self!r}); delete keys or use a larger store"
            return Effects([Send(connection, m.Failed(message.call, reason))])
        was_durable = entry is not None and entry.owner is None
        self._disown(message.key, entry)
        owner = connection if message.leased else None
        self._entries[message.key] = _Entry(message.value, owner)
        self._bytes += grown
        if owner is not None:
            self._connections[owner].owned.add(message.key)
        effects = Effects()
        self._tell(message.key, message.value, effects)
        _answer(connection, message.call, effects, save=was_durable or owner is None)
        return effects

    def _swap(self, connection: int, message: m.SwapKey) -> Effects:
        entry = self._entries.get(message.key)
        held = entry.value if entry is not None else None
        if held != message.expected and held != message.value:
            return Effects([Send(connection, m.Value(message.call, held))])
        if message.value is None:
            return self._delete(connection, m.DeleteKey(message.call, message.key, False))
        return self._put(connection, m.PutKey(message.call, message.key, message.value, False))

    def _delete(self, connection: int, message: m.DeleteKey) -> Effects:
        effects = Effects()
        entry = self._entries.get(message.key)
        save = False
        if entry is not None and (not message.own or entry.owner == connection):
            save = entry.owner is None
            self._remove(message.key, effects)
        _answer(connection, message.call, effects, save=save)
        return effects

    def _watch(self, connection: int, message: m.WatchPrefix) -> Effects:
        check_prefix(message.prefix)
        state = self._connections[connection]
        if message.watch not in state.watches and len(state.watches) >= self._limits.watches_per_connection_max:
            raise ValueError(f"more than {self._limits.watches_per_connection_max} watches on one connection")
        watch = state.watches[message.watch] = _Watch(message.prefix, stale=state.blocked)
        return Effects() if watch.stale else Effects(self._snapshot(connection, message.watch, message.prefix))

    def _unwatch(self, connection: int, message: m.Unwatch) -> Effects:
        self._connections[connection].watches.pop(message.watch, None)
        return Effects()

    def _remove(self, key: str, effects: Effects) -> None:
        entry = self._entries.pop(key)
        self._bytes -= _size(key, entry.value)
        self._disown(key, entry)
        self._tell(key, None, effects)

    def _disown(self, key: str, entry: _Entry | None) -> None:
        if entry is not None and entry.owner in self._connections:
            self._connections[entry.owner].owned.discard(key)

    def _tell(self, key: str, value: bytes | None, effects: Effects) -> None:
        for connection, state in self._connections.items():
            for number, watch in state.watches.items():
                if watch.stale or not key.startswith(watch.prefix):
                    continue
                if state.blocked:
                    watch.stale = True
                else:
                    effects.sends.append(Send(connection, m.Changed(number, key, value)))

    def _snapshot(self, connection: int, watch: int, prefix: str) -> list[Send]:
        under = [(key, entry.value) for key, entry in self._entries.items() if key.startswith(prefix)]
        return [Send(connection, m.WatchItems(watch, items, last)) for items, last in m.in_parts(under)]


_HANDLERS: dict[type, Callable[..., Effects]] = {
    m.Ping: StoreMachine._ping,
    m.Get: StoreMachine._get,
    m.PutKey: StoreMachine._put,
    m.SwapKey: StoreMachine._swap,
    m.DeleteKey: StoreMachine._delete,
    m.WatchPrefix: StoreMachine._watch,
    m.Unwatch: StoreMachine._unwatch,
}


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value)


def _answer(connection: int, call: int, effects: Effects, *, save: bool) -> None:
    (effects.after_save if save else effects.sends).append(Send(connection, m.Done(call)))


def _refuse(connection: int, code: str, reason: str) -> Effects:
    return Effects([Send(connection, Refused(code, reason))])
