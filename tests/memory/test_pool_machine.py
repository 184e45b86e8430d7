"""The KV pool's machine: against a model that knows which processes could still write, and rule by rule; its news."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.memory.vault import pool_machine as machine
from holdfast.memory.vault.pool_machine import (
    Acquire,
    Cancel,
    Code,
    CpuFence,
    Donate,
    DropPool,
    Gone,
    GpuFence,
    GrantPool,
    Made,
    MapperJoined,
    Orphaned,
    Pages,
    Pool,
    PoolMade,
    ProcessOver,
    Quiesced,
    Refuse,
    Seat,
    Tick,
    TimedOut,
    missed,
    next_deadline_s,
    restore,
    step,
)


@dataclass
class Client:
    """A real thing: one connection of one process, and what it has done to the device."""

    session: int
    process: int
    epoch: int | None = None  # set: it may have queued work under this epoch
    connected: bool = True


class PoolModel(RuleBasedStateMachine):
    """Processes connect, win elections, freeze, die in any order; two connections may belong to one process."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Pool()
        self.now_s = 0.0
        self.clients: dict[int, Client] = {}
        self.over: set[int] = set()
        self.waiting: dict[int, Acquire] = {}
        self.owner: int | None = None
        self.granted: list[int] = []
        self.pool: tuple[str, int] | None = None  # geometry, and the epoch it was made under: 0 until complete
        self.fences: dict[int, list[str]] = {}

    def some(self, pick: int, *, connected: bool = True) -> Client | None:
        known = [c for c in self.clients.values() if c.connected or not connected]
        return known[pick % len(known)] if known else None

    # -- what happens

    @initialize(made=st.booleans(), rank=st.booleans(), waiters=st.integers(0, 2))
    def begin(self, made: bool, rank: bool, waiters: int) -> None:
        """In the middle: a walk from nothing seldom gets far."""
        for _ in range(5):
            self.connect(same_process=False, pick=0)
        self.acquire(0, 1, "g1", 60.0)
        if made:
            self.finish_the_pool()
        if rank:
            self.join_under_an_epoch(1, 0)
        for standby in range(waiters):
            self.acquire(2 + standby, 1 + standby, "g1", 60.0)

    @rule(same_process=st.booleans(), pick=st.integers(0, 9))
    def connect(self, same_process: bool, pick: int) -> None:
        session = len(self.clients)
        peer = self.some(pick) if same_process else None
        process = session if peer is None or peer.process in self.over else peer.process
        self.clients[session] = Client(session, process)
        assert self.do(MapperJoined(session, None, process)) == ()

    @rule(pick=st.integers(0, 9), back=st.integers(-1, 2))
    def join_under_an_epoch(self, pick: int, back: int) -> None:
        client = self.some(pick)
        epoch = max(self.granted, default=0) - back
        if client is None or client.epoch is not None:
            return
        may = self.owner is not None and back == 0 and client.session not in self.waiting
        effects = self.do(MapperJoined(client.session, epoch, client.process))
        if may:
            assert effects == ()
            client.epoch = epoch
        else:
            assert isinstance(effects[0], Refuse)

    @rule(
        pick=st.integers(0, 9),
        ahead=st.integers(-1, 3),
        geometry=st.sampled_from(["g1", "g1", "g2"]),
        timeout_s=st.sampled_from([60.0, 10.0, 2.0, 0.0]),
    )
    def acquire(self, pick: int, ahead: int, geometry: str, timeout_s: float) -> None:
        client = self.some(pick)
        if client is None:
            return
        event = Acquire(client.session, max(self.granted, default=0) + ahead, geometry, self.now_s + timeout_s)
        may = client.epoch is None and client.session not in self.waiting and ahead > 0
        if may:
            self.waiting[client.session] = event
        refused = [e for e in self.do(event) if isinstance(e, Refuse) and e.session == client.session]
        assert bool(refused) == (not may) or (may and client.session not in self.waiting)

    @precondition(lambda self: self.owner is not None)
    @rule(pick=st.integers(0, 9))
    def a_rank_joins_the_owner(self, pick: int) -> None:
        self.join_under_an_epoch(pick, 0)

    @precondition(lambda self: self.owner is not None)
    @rule()
    def the_owner_disconnects(self) -> None:
        assert self.owner is not None
        self.close(self.clients[self.owner])

    @precondition(lambda self: self.owner is not None)
    @rule(pick=st.integers(0, 9), ahead=st.integers(1, 3))
    def a_standby_wins_the_election(self, pick: int, ahead: int) -> None:
        assert self.pool is not None
        standbys = [c for c in self.clients.values() if c.connected and c.epoch is None]
        if standbys:
            connected = [c for c in self.clients.values() if c.connected]
            self.acquire(connected.index(standbys[pick % len(standbys)]), ahead, self.pool[0], 60.0)

    @precondition(lambda self: self.owner is not None)
    @rule()
    def finish_the_pool(self) -> None:
        assert self.owner is not None
        assert self.pool is not None
        geometry, made_epoch = self.pool
        effects = self.do(PoolMade(self.owner, self.granted[-1]))
        assert effects == (() if made_epoch else (Made(self.granted[-1]),))
        self.pool = (geometry, made_epoch or self.granted[-1])

    @rule(pick=st.integers(0, 9))
    def disconnect(self, pick: int) -> None:
        """The connection closes first; that the process is over shows later."""
        client = self.some(pick)
        if client is not None:
            self.close(client)

    def close(self, client: Client) -> None:
        client.connected = False
        self.waiting.pop(client.session, None)
        self.do(Gone(client.session))

    @rule(pick=st.integers(0, 9))
    def process_over(self, pick: int) -> None:
        """Also while a child still holds the connection (facts 4d)."""
        client = self.some(pick, connected=False)
        if client is not None:
            self.over.add(client.process)
            self.do(ProcessOver(client.process))

    @rule(pick=st.integers(0, 9))
    def quiesce(self, pick: int) -> None:
        client = self.some(pick)
        if client is None or client.epoch is None:
            return
        epoch, client.epoch = client.epoch, None
        for other in self.clients.values():
            if other.process == client.process and not other.connected and other.epoch == epoch:
                other.epoch = None
        self.do(Quiesced(client.session, epoch))

    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        client = self.some(pick)
        if client is not None:
            self.waiting.pop(client.session, None)
            self.do(Cancel(client.session))

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(Tick())

    @precondition(lambda self: len(self.granted) > 1)
    @rule()
    def restart_the_vault(self) -> None:
        """Waiters lose their connection; seats are in the records."""
        self.waiting = {}
        pages = None if self.pool is None else Pages(*self.pool)
        seats = [
            Seat(c.session, c.process, c.epoch, closed=not c.connected, over=c.process in self.over)
            for c in self.clients.values()
        ]
        self.state, effects = restore(max(self.granted, default=0), pages, self.owner, seats)
        assert effects == ()
        if self.owner is not None:
            self.fences[self.granted[-1]] = ["cpu"]
        self.do(Tick())

    # -- what is told

    def do(self, event: machine.Event) -> tuple[machine.Effect, ...]:
        self.state, effects = step(self.state, event, self.now_s)
        for effect in effects:
            self.hear(effect)
        return effects

    def can_queue(self, epoch: int) -> list[Client]:
        return [c for c in self.clients.values() if c.connected and c.epoch is not None and c.epoch < epoch]

    def can_land(self, epoch: int) -> list[Client]:
        return [
            c
            for c in self.clients.values()
            if c.epoch is not None and c.epoch < epoch and (c.connected or c.process not in self.over)
        ]

    def hear(self, effect: machine.Effect) -> None:
        match effect:
            case CpuFence(session, epoch):
                assert not self.can_queue(epoch), "a predecessor can still queue work"
                assert self.fences.setdefault(epoch, []) == []
                self.fences[epoch].append("cpu")
            case GrantPool(session, epoch, made_epoch):
                self.hear_grant(session, epoch, made_epoch)
            case GpuFence(session, epoch):
                assert self.owner == session
                assert epoch == self.granted[-1]
                assert not self.can_land(epoch), "queued work can still land"
                assert self.fences[epoch] == ["cpu"]
                self.fences[epoch].append("gpu")
            case Orphaned(epoch):
                assert epoch == self.granted[-1]
                assert self.owner is not None, "it is told once"
                self.owner = None
            case DropPool(epoch):
                assert epoch == self.granted[-1]
                assert self.owner is None, "its end must be told first"
                self.pool = None
            case TimedOut(session):
                assert self.waiting.pop(session).deadline_s <= self.now_s
            case Refuse(session, code):
                # A refused join of one who waits answers the join, not the wait.
                if code is Code.STALE_EPOCH and session in self.waiting and self.overtaken(session):
                    del self.waiting[session]

    def overtaken(self, session: int) -> bool:
        return self.waiting[session].epoch <= max(self.granted, default=0)

    def hear_grant(self, session: int, epoch: int, made_epoch: int) -> None:
        assert epoch == max(ask.epoch for ask in self.waiting.values()), "the election's last word was not heard"
        ask = self.waiting.pop(session)
        assert self.owner is None, "two owners"
        assert epoch == ask.epoch > max(self.granted, default=0), "epochs must grow"
        assert self.fences[epoch] == ["cpu"], "granted before the fence"
        if made_epoch:
            assert self.pool == (ask.geometry_hash, made_epoch)
        else:
            assert self.pool is None
            assert not self.can_land(epoch)
            self.pool = (ask.geometry_hash, 0)
        self.owner = session
        self.granted.append(epoch)
        self.clients[session].epoch = epoch

    # -- what is always true

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        assert {waiter.session for waiter in self.state.waiters} == set(self.waiting)
        if self.waiting:
            top = max(self.waiting.values(), key=lambda ask: ask.epoch)
            adoptable = self.pool is not None and self.pool[0] == top.geometry_hash
            assert self.can_queue(top.epoch) if adoptable else self.can_land(top.epoch)
            assert all(ask.epoch > max(self.granted, default=0) for ask in self.waiting.values())

    @invariant()
    def the_gpu_fence_is_told_as_soon_as_it_is_true(self) -> None:
        if self.owner is not None:
            epoch = self.granted[-1]
            assert ("gpu" in self.fences[epoch]) == (not self.can_land(epoch))

    @invariant()
    def no_seat_outlives_its_use(self) -> None:
        used = [c for c in self.clients.values() if c.connected or (c.epoch is not None and c.process not in self.over)]
        assert len(self.state.seats) == len(used)

    @invariant()
    def the_phase_is_what_was_told(self) -> None:
        expected = "OWNED" if self.owner is not None else "ABSENT" if self.pool is None else "ORPHANED"
        assert repr(self.state).startswith(expected)
        due_s = next_deadline_s(self.state)
        assert due_s is None or due_s > self.now_s

    def teardown(self) -> None:
        """Every waiter comes to an end by time alone."""
        for _ in range(len(self.waiting) + 1):
            if (due_s := next_deadline_s(self.state)) is not None:
                self.now_s = due_s
                self.do(Tick())
        assert not self.waiting


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def refusals(effects: tuple[machine.Effect, ...]) -> list[Code]:
    return [effect.code for effect in effects if isinstance(effect, Refuse)]


def test_a_process_may_vouch_for_a_connection_it_has_closed() -> None:
    """An owner that reconnected instead of dying ends the wait for its own end by quiescing its old epoch."""
    state, _ = step(Pool(), MapperJoined(1, None, 7), 0.0)
    state, _ = step(state, Acquire(1, 100, "g1", 9.0), 0.0)
    state, _ = step(state, PoolMade(1, 100), 0.0)
    state, _ = step(state, Gone(1), 0.0)
    state, _ = step(state, MapperJoined(2, None, 7), 0.0)
    state, effects = step(state, Acquire(2, 101, "g2", 9.0), 0.0)
    assert effects == ()
    state, effects = step(state, Quiesced(2, 100), 0.0)
    assert effects == (DropPool(100), CpuFence(2, 101), GrantPool(2, 101, made_epoch=0), GpuFence(2, 101))


def test_everything_a_session_maps_with_counts_under_its_epoch() -> None:
    """A process named later, and one named under the epoch, both keep the GPU fence closed until they are over."""
    state, _ = step(Pool(), MapperJoined(1, None, 7), 0.0)
    state, _ = step(state, Acquire(1, 100, "g1", 9.0), 0.0)
    state, _ = step(state, PoolMade(1, 100), 0.0)
    state, _ = step(state, MapperJoined(1, None, 8), 0.0)
    state, _ = step(state, MapperJoined(1, 100, 9), 0.0)
    state, _ = step(state, MapperJoined(2, None, 20), 0.0)
    state, _ = step(state, Gone(1), 0.0)
    state, effects = step(state, Acquire(2, 101, "g1", 9.0), 0.0)
    assert effects == (CpuFence(2, 101), GrantPool(2, 101, made_epoch=100))
    for process in (7, 9):
        state, effects = step(state, ProcessOver(process), 0.0)
        assert effects == ()
    state, effects = step(state, ProcessOver(8), 0.0)
    assert effects == (GpuFence(2, 101),)


def test_seats_and_waiters_are_bounded() -> None:
    """One more than the bound is refused by name."""
    state = Pool()
    for session in range(machine.SEATS_MAX):
        state, _ = step(state, MapperJoined(session, None, session), 0.0)
    assert refusals(step(state, MapperJoined(5000, None, 5000), 0.0)[1]) == [Code.TOO_MANY]
    state, _ = step(state, Acquire(0, 1, "g1", 9.0), 0.0)
    for session in range(1, machine.WAITERS_MAX + 1):
        state, effects = step(state, Acquire(session, 1 + session, "g1", 9.0), 0.0)
        assert effects == ()
    assert refusals(step(state, Acquire(1000, 1000, "g1", 9.0), 0.0)[1]) == [Code.TOO_MANY]


def test_a_donation_needs_an_empty_place_and_a_newer_epoch() -> None:
    """After a total loss the owner goes on owning; with a pool here, or a larger epoch, it is told that it is over."""
    state, _ = step(Pool(), MapperJoined(1, None, 7), 0.0)
    assert refusals(step(state, Donate(2, 100, "g1", 100), 0.0)[1]) == [Code.NOT_REGISTERED]
    for made_epoch in (0, -1, 101):
        assert refusals(step(state, Donate(1, 100, "g1", made_epoch), 0.0)[1]) == [Code.NOT_GRANTED]
    owned, effects = step(state, Donate(1, 100, "g1", 90), 0.0)
    assert effects == (CpuFence(1, 100), GrantPool(1, 100, made_epoch=90), Made(90), GpuFence(1, 100))
    owned, _ = step(owned, MapperJoined(2, None, 8), 0.0)
    assert refusals(step(owned, Donate(2, 99, "g1", 90), 0.0)[1]) == [Code.STALE_EPOCH]
    assert refusals(step(owned, Donate(2, 101, "g1", 90), 0.0)[1]) == [Code.POOL_HERE]


def test_a_restored_pool_without_an_owner_must_be_complete() -> None:
    """A vault and an owner that died together while the pool was being made: it is dropped, not adopted."""
    state, effects = restore(100, Pages("g1"), None, ())
    assert effects == (DropPool(100),)
    assert (state.phase, state.last_epoch) == ("ABSENT", 100)


def test_a_pool_is_known_by_the_epoch_it_was_made_under_through_all_its_owners() -> None:
    """Two owners later, also through a restart and a needless `PoolMade`, it is still the pool of epoch 100."""
    state, _ = step(Pool(), MapperJoined(1, None, 7), 0.0)
    state, _ = step(state, Acquire(1, 100, "g1", 9.0), 0.0)
    state, effects = step(state, PoolMade(1, 100), 0.0)
    assert effects == (Made(100),)
    for epoch in (101, 102):
        state, _ = step(state, MapperJoined(epoch, None, epoch), 0.0)
        state, _ = step(state, Gone(state.owner or 0), 0.0)
        state, effects = step(state, Acquire(epoch, epoch, "g1", 9.0), 0.0)
        assert effects[:2] == (CpuFence(epoch, epoch), GrantPool(epoch, epoch, made_epoch=100))
        state, effects = step(state, PoolMade(epoch, epoch), 0.0)
        assert effects == ()
        state, _ = restore(state.last_epoch, state.pages, state.owner, state.seats)
    assert state.pages == Pages("g1", 100)


OWNED = Seat(1, 7, 100)


@pytest.mark.parametrize(
    ("state", "heard"),
    [
        (Pool(), []),
        (Pool(100, Pages("g1"), 1, seats=(OWNED,)), [("granted", 100)]),
        (Pool(100, Pages("g1", 90), 1, seats=(OWNED,)), [("granted", 100), ("made", 90)]),
        (Pool(100, Pages("g1", 90)), [("made", 90), ("owner_gone", 100)]),
        (Pool(100), [("owner_gone", 100), ("dropped", 100)]),
    ],
)
def test_who_comes_late_hears_how_the_pool_stands(state: Pool, heard: list[tuple[str, int]]) -> None:
    """Each phase of the pool has its news, and the owner's end is among it whenever nobody owns."""
    assert [(news.kind, news.epoch) for news in missed(state)] == heard
