"""The lock server's machine: stories in transcripts, the table, and rules that hold whatever happens.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.failover.lock_server.machine import (
    TABLE,
    TOO_MANY,
    WAITERS_MAX,
    Acquire,
    Client,
    ClientEnded,
    ConfirmRelease,
    DropClient,
    Effect,
    ElectionClaim,
    ElectionRecord,
    Event,
    Grant,
    GrantFreed,
    GrantTo,
    LockState,
    Missing,
    Refuse,
    Release,
    Save,
    Situation,
    Tick,
    begin,
    next_deadline_s,
    step,
)
from tests.rigs.transcripts import must_go_as_written, stories

WINDOW_S = 3.0


class Story:
    """Clients by name, each with one connection at a time, a server and its file."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.window_s = WINDOW_S
        self.file: ElectionRecord | None = None
        self.readable = True
        self.state = begin(None, True, WINDOW_S, 0.0, 0.0)
        self.connections: dict[str, int] = {}
        self.names: dict[int, str] = {}

    def play(self, command: str) -> list[str]:
        name, *words = command.split()
        lines = self._server(words) if name == "server" else getattr(self, f"do_{name}", None)
        if lines is None:
            lines = self._client(name, words[0], words[1:])
        elif callable(lines):
            lines = lines(words)
        return [f"  {self.now_s:7.1f}  {line}" for line in lines]

    def do_status(self, words: list[str]) -> list[str]:
        return [repr(self.state)]

    def do_after(self, words: list[str]) -> list[str]:
        """`after 1.5`: time passes; a due tick comes when it is due."""
        end_s = self.now_s + float(words[0])
        lines = []
        while (due_s := next_deadline_s(self.state)) is not None and due_s <= end_s:
            self.now_s = due_s
            lines += self._step(Tick())
        self.now_s = end_s
        return lines

    def do_file(self, words: list[str]) -> list[str]:
        """`file is removed`, `file is garbled`."""
        self.file, self.readable = None, words[1] == "removed"
        return []

    def _server(self, words: list[str]) -> list[str]:
        """`server restarts [window=S]`: connections are gone, the file is what it was."""
        for word in words[1:]:
            self.window_s = float(word.removeprefix("window="))
        self.connections.clear()
        self.state = begin(self.file, self.readable, self.window_s, self.now_s, self.now_s)
        return [repr(self.state)]

    def _client(self, name: str, verb: str, words: list[str]) -> list[str]:
        connection = self.connections.get(name, 0)
        match verb:
            case "asks":
                number = self.connections[name] = len(self.names) + 1
                self.names[number] = name
                grant = int(words[1]) if words[:1] == ["holding"] else 0
                return self._step(Acquire(number, Client(f"id of {name}", name), grant)) or [f"{name} waits"]
            case "insists":
                return self._step(Acquire(connection, Client(f"id of {name}", name)))
            case "releases":
                return self._step(Release(connection))
            case "dies":
                return self._step(ClientEnded(self.connections.pop(name)))
            case "resets":
                return self._step(ClientEnded(self.connections.pop(name), sure=False))
        raise AssertionError(f"no story has {verb!r}")

    def _step(self, event: Event) -> list[str]:
        self.state, effects = step(self.state, event, self.now_s)
        return [self._tell(effect) for effect in effects]

    def _tell(self, effect: Effect) -> str:
        match effect:
            case Save(record):
                self.file, self.readable = record, True
                held = (
                    "nobody" if record.grant is None else f"{record.grant.client.engine}, grant {record.grant.number}"
                )
                return f"file: {held}"
            case GrantTo(connection, grant, back, waited_s):
                how = "is back with" if back else f"has, after {waited_s:.1f} s,"
                return f"{self.names[connection]} {how} grant {grant.number}"
            case GrantFreed(grant, why, held_s):
                return f"grant {grant.number} of {grant.client.engine} is over after {held_s:.1f} s: {why}"
            case Missing(grant, until_s):
                return f"{grant.client.engine} is awaited until {until_s:.1f}"
            case Refuse(connection, code, reason):
                return f"{self.names[connection]} is refused: {code}: {reason}"
            case ConfirmRelease(connection):
                return f"{self.names[connection]} is told: released"
            case DropClient(connection):
                return f"connection {connection} of {self.names[connection]} is closed"


@stories("lock_server", least=11)
def test_the_lock_server_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those of today's machine."""
    must_go_as_written(path, Story)


def test_the_table_answers_everything_that_can_be_asked() -> None:
    """Every situation and claim has an answer, but for the two that cannot be: an own grant where none is on record."""
    impossible = {(Situation.FREE, ElectionClaim.OWN), (Situation.UNKNOWN, ElectionClaim.OWN)}
    assert set(TABLE) == set(product(Situation, ElectionClaim)) - impossible


def test_the_queue_is_bounded() -> None:
    """One more than the bound is refused by name, and those who wait stay."""
    state = begin(None, True, WINDOW_S, 0.0, 0.0)
    for number in range(1, WAITERS_MAX + 2):
        state, _ = step(state, Acquire(number, Client(str(number), "w")), 0.0)
    state, effects = step(state, Acquire(9999, Client("one more", "w")), 0.0)
    assert [effect.code for effect in effects if isinstance(effect, Refuse)] == [TOO_MANY]
    assert len(state.waiters) == WAITERS_MAX


class World:
    """A machine, its file, and clients of which each knows what it was told; checked after every step."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.file: ElectionRecord | None = None
        self.readable = True
        self.restart()
        self.open: dict[int, str] = {}
        self.last_connection = 0
        self.told: dict[str, Grant] = {}  # who was told a grant, and which
        self.window: tuple[float, str] | None = None  # until when only that id may be granted the lock

    def restart(self) -> None:
        self.state = begin(self.file, self.readable, WINDOW_S, self.now_s, self.now_s)
        self.open = {}
        if not self.readable:
            self.window = (self.now_s + WINDOW_S, "")
        elif self.file is not None and self.file.grant is not None:
            self.window = (self.now_s + WINDOW_S, self.file.grant.client.id)

    def connect(self, name: str, claim: bool) -> None:
        self.last_connection += 1
        self.open[self.last_connection] = name
        grant = self.told[name].number if claim and name in self.told else 0
        self.take(Acquire(self.last_connection, Client(name, name), grant))

    def take(self, event: Event) -> None:
        if isinstance(event, ClientEnded):
            held = self.state.connection == event.connection
            name = self.open.pop(event.connection)
            if held and not event.sure:
                self.window = (self.now_s + WINDOW_S, name)
        self.state, effects = step(self.state, event, self.now_s)
        for effect in effects:
            self.check(effect)
        due_s = next_deadline_s(self.state)
        assert due_s is None or due_s > self.now_s
        assert self.state.situation is not Situation.FREE or not self.state.waiters

    def check(self, effect: Effect) -> None:
        if isinstance(effect, Save):
            self.file, self.readable = effect.record, True
        elif isinstance(effect, Refuse | DropClient):
            self.open.pop(effect.connection)
        elif isinstance(effect, GrantTo):
            name = self.open[effect.connection]
            assert effect.grant.client.id == name
            assert self.file is not None
            assert self.file.grant == effect.grant, "told before it was saved"
            if self.window is not None and self.now_s < self.window[0]:
                assert self.window[1] == name, "granted to another inside the window"
            self.window = None
            if not effect.back:
                assert all(effect.grant.number > grant.number for grant in self.told.values()) or not self.told
            self.told[name] = effect.grant


NAMES = st.sampled_from("abcd")
MOVES = st.one_of(
    st.tuples(st.just("connect"), NAMES, st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("release"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("restart"), st.booleans(), st.booleans()),
    st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, 2.9, 3.0]), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(MOVES, max_size=40))
def test_nobody_is_granted_inside_anothers_window(moves: list[tuple[str, object, bool]]) -> None:
    """Whatever happens: saved before told, in a window only who is awaited, never a connection that is over."""
    world = World()
    for verb, what, flag in moves:
        world.now_s += 0.01
        connections = list(world.open)
        if verb == "connect":
            world.connect(str(what), flag)
        elif verb == "restart":
            if what and flag:
                world.readable = False
                world.told.clear()  # numbers begin anew
            world.restart()
        elif verb == "pass":
            assert isinstance(what, float)
            world.now_s += what
            world.take(Tick())
        elif connections:
            assert isinstance(what, int)
            chosen = connections[what % len(connections)]
            world.take(ClientEnded(chosen, flag) if verb == "end" else Release(chosen))


def test_a_state_that_cannot_be_is_an_error() -> None:
    """A holder without a grant is our own bug."""
    with pytest.raises(AssertionError):
        LockState(WINDOW_S, 0.0, connection=1)
