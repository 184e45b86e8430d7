"""The embedded store's machine against a plain model, and its rules one by one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from holdfast.store import messages as m
from holdfast.store.machine import DEFAULT_LIMITS, Effects, StoreLimits, StoreMachine

KEYS = st.sampled_from(["a", "a/1", "a/2", "b/1", "b/é"])
PREFIXES = st.sampled_from(["", "a", "a/", "b/", "c"])
VALUES = st.binary(max_size=3)


class StoreModel(RuleBasedStateMachine):
    """Whatever happens, the machine's keys are the model's and every flowing watch adds up to them."""

    connections = Bundle("connections")

    def __init__(self) -> None:
        super().__init__()
        self.machine = StoreMachine({"a": b"from disk"})
        self.truth: dict[str, tuple[bytes, int | None]] = {"a": (b"from disk", None)}
        self.disk = {"a": b"from disk"}
        self.live: set[int] = set()
        self.blocked: set[int] = set()
        # What each watch's receiver has been told, by (connection, watch); and what it watches.
        self.views: dict[tuple[int, int], dict[str, bytes]] = {}
        self.prefixes: dict[tuple[int, int], str] = {}
        self.numbers = 0

    def take(self, effects: Effects) -> list[m.ToClient]:
        """Receive what is sent; answers are returned."""
        if effects.after_save:
            self.disk = self.machine.durable_items()
        answers: list[m.ToClient] = []
        for send in effects.sends + effects.after_save:
            place = (send.connection, getattr(send.message, "watch", -1))
            match send.message:
                case m.WatchItems(_, items, last):
                    assert last
                    self.views[place] = dict(items)
                case m.Changed(_, key, None):
                    self.views[place].pop(key)
                case m.Changed(_, key, value):
                    self.views[place][key] = value
                case answer:
                    answers.append(answer)
            assert not (place[1] >= 0 and send.connection in self.blocked), "told a receiver that does not read"
        return answers

    @rule(target=connections)
    def connect(self) -> int:
        self.numbers += 1
        self.machine.connect(self.numbers)
        self.live.add(self.numbers)
        assert self.take(self.machine.handle(self.numbers, m.Hello(m.VERSION))) == [m.Welcome(m.VERSION)]
        return self.numbers

    @rule(connection=consumes(connections))
    def disconnect(self, connection: int) -> None:
        self.take(self.machine.disconnect(connection))
        self.live.discard(connection)
        self.blocked.discard(connection)
        self.truth = {key: entry for key, entry in self.truth.items() if entry[1] != connection}
        for place in [place for place in self.views if place[0] == connection]:
            del self.views[place]
        for place in [place for place in self.prefixes if place[0] == connection]:
            del self.prefixes[place]

    @rule(connection=connections, key=KEYS, value=VALUES, leased=st.booleans())
    def put(self, connection: int, key: str, value: bytes, leased: bool) -> None:
        assert self.take(self.machine.handle(connection, m.PutKey(7, key, value, leased))) == [m.Done(7)]
        self.truth[key] = (value, connection if leased else None)

    @rule(connection=connections, key=KEYS, value=st.none() | VALUES, expected=st.none() | VALUES)
    def swap(self, connection: int, key: str, value: bytes | None, expected: bytes | None) -> None:
        held = self.truth[key][0] if key in self.truth else None
        [answer] = self.take(self.machine.handle(connection, m.SwapKey(7, key, value, expected)))
        if held in (expected, value):
            assert answer == m.Done(7)
            self.truth.pop(key, None)
            self.truth |= {key: (value, None)} if value is not None else {}
        else:
            assert answer == m.Value(7, held)

    @rule(connection=connections, key=KEYS, own=st.booleans())
    def delete(self, connection: int, key: str, own: bool) -> None:
        assert self.take(self.machine.handle(connection, m.DeleteKey(8, key, own))) == [m.Done(8)]
        if key in self.truth and (not own or self.truth[key][1] == connection):
            del self.truth[key]

    @rule(connection=connections, key=KEYS)
    def get(self, connection: int, key: str) -> None:
        held = self.truth.get(key)
        assert self.take(self.machine.handle(connection, m.Get(9, key))) == [m.Value(9, held[0] if held else None)]

    @rule(connection=connections, watch=st.integers(0, 2), prefix=PREFIXES)
    def watch(self, connection: int, watch: int, prefix: str) -> None:
        self.prefixes[connection, watch] = prefix
        assert self.take(self.machine.handle(connection, m.WatchPrefix(watch, prefix))) == []

    @rule(connection=connections, watch=st.integers(0, 2))
    def unwatch(self, connection: int, watch: int) -> None:
        assert self.take(self.machine.handle(connection, m.Unwatch(watch))) == []
        self.prefixes.pop((connection, watch), None)
        self.views.pop((connection, watch), None)

    @rule(connection=connections)
    def block(self, connection: int) -> None:
        self.machine.block(connection)
        self.blocked.add(connection)

    @rule(connection=connections)
    def unblock(self, connection: int) -> None:
        self.machine.unblock(connection)
        self.blocked.discard(connection)
        while (effects := self.machine.refresh(connection)).sends:
            self.take(effects)

    def under(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, (value, _) in self.truth.items() if key.startswith(prefix)}

    @invariant()
    def flowing_watches_add_up(self) -> None:
        for place, prefix in self.prefixes.items():
            if place[0] not in self.blocked:
                assert self.views[place] == self.under(prefix)

    @invariant()
    def disk_holds_the_durable_keys(self) -> None:
        assert self.disk == {key: value for key, (value, owner) in self.truth.items() if owner is None}


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def greeted(limits: StoreLimits = DEFAULT_LIMITS) -> StoreMachine:
    machine = StoreMachine({}, limits)
    machine.connect(1)
    machine.handle(1, m.Hello(m.VERSION))
    return machine


def only(effects: Effects) -> m.ToClient:
    (send,) = effects.sends
    return send.message


def test_a_full_store_refuses_growth_only() -> None:
    """At its limits a store takes no new key and no larger value, but lets keys shrink and go."""
    machine = greeted(StoreLimits(keys_max=2, bytes_max=10))
    assert only(machine.handle(1, m.PutKey(1, "a", b"1234", True))) == m.Done(1)
    assert only(machine.handle(1, m.PutKey(2, "b", b"123", True))) == m.Done(2)
    assert isinstance(only(machine.handle(1, m.PutKey(3, "c", b"", True))), m.Failed)
    failed = only(machine.handle(1, m.PutKey(4, "b", b"123456", True)))
    assert isinstance(failed, m.Failed)
    assert "full" in failed.reason
    assert only(machine.handle(1, m.PutKey(5, "b", b"", True))) == m.Done(5)
    assert only(machine.handle(1, m.DeleteKey(6, "a", False))) == m.Done(6)
    assert only(machine.handle(1, m.PutKey(7, "c", b"", True))) == m.Done(7)


def test_limits_of_keys_values_and_watches_are_the_servers_too() -> None:
    """A client that does not check its own limits is refused, and the reason names the field."""
    machine = greeted(StoreLimits(watches_per_connection_max=1))
    for message, field in [
        (m.PutKey(1, "", b"", True), "key"),
        (m.PutKey(1, "k" * 513, b"", True), "key"),
        (m.PutKey(1, "k", b"v" * (1024 * 1024 + 1), True), "value"),
        (m.WatchPrefix(1, "p" * 513), "prefix"),
    ]:
        refused = only(machine.handle(1, message))
        assert isinstance(refused, m.Refused)
        assert refused.reason.startswith(field)
    assert isinstance(only(machine.handle(1, m.WatchPrefix(1, ""))), m.WatchItems)
    assert isinstance(only(machine.handle(1, m.WatchPrefix(2, ""))), m.Refused)
