"""The KV pool's machine: against a model that knows which processes could still write, and rule by rule; its news."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.memory.vault import pool_machine as machine


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
        self.state = machine.PoolState()
        self.now_s = 0.0
        self.clients: dict[int, Client] = {}
        self.over: set[int] = set()
        self.waiting: dict[int, machine.PoolRequested] = {}
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
        assert self.do(machine.MapperJoined(session, None, process)) == ()

    @rule(pick=st.integers(0, 9), back=st.integers(-1, 2))
    def join_under_an_epoch(self, pick: int, back: int) -> None:
        client = self.some(pick)
        epoch = max(self.granted, default=0) - back
        if client is None or client.epoch is not None:
            return
        may = self.owner is not None and back == 0 and client.session not in self.waiting
        effects = self.do(machine.MapperJoined(client.session, epoch, client.process))
        if may:
            assert effects == ()
            client.epoch = epoch
        else:
            assert isinstance(effects[0], machine.RefusePool)

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
        event = machine.PoolRequested(
            client.session, max(self.granted, default=0) + ahead, geometry, self.now_s + timeout_s
        )
        may = client.epoch is None and client.session not in self.waiting and ahead > 0
        if may:
            self.waiting[client.session] = event
        refused = [e for e in self.do(event) if isinstance(e, machine.RefusePool) and e.session == client.session]
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
        effects = self.do(machine.PoolMade(self.owner, self.granted[-1]))
        assert effects == (() if made_epoch else (machine.TellPoolMade(self.granted[-1]),))
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
        self.do(machine.ClientGone(client.session))

    @rule(pick=st.integers(0, 9))
    def process_over(self, pick: int) -> None:
        """Also while a child still holds the connection (facts 4d)."""
        client = self.some(pick, connected=False)
        if client is not None:
            self.over.add(client.process)
            self.do(machine.ProcessOver(client.process))

    @rule(pick=st.integers(0, 9))
    def quiesce(self, pick: int) -> None:
        client = self.some(pick)
        if client is None or client.epoch is None:
            return
        epoch, client.epoch = client.epoch, None
        for other in self.clients.values():
            if other.process == client.process and not other.connected and other.epoch == epoch:
                other.epoch = None
        self.do(machine.OwnerQuiesced(client.session, epoch))

    @rule()
    def discard(self) -> None:
        """Its memory is wanted back: it goes, unless somebody owns it or may have work queued on it."""
        used = self.owner is not None or self.can_land(max(self.granted, default=0) + 1)
        goes = self.pool is not None and not used
        effects = self.do(machine.Discard())
        assert (machine.DropPool(max(self.granted, default=0)) in effects) == goes

    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        client = self.some(pick)
        if client is not None:
            self.waiting.pop(client.session, None)
            self.do(machine.CancelAcquire(client.session))

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(machine.PoolTick())

    @precondition(lambda self: len(self.granted) > 1)
    @rule()
    def restart_the_vault(self) -> None:
        """Waiters lose their connection; mappers are in the records."""
        self.waiting = {}
        pages = None if self.pool is None else machine.PoolPages(*self.pool)
        mappers = [
            machine.Mapper(c.session, c.process, c.epoch, closed=not c.connected, over=c.process in self.over)
            for c in self.clients.values()
        ]
        self.state, effects = machine.restore(max(self.granted, default=0), pages, self.owner, mappers)
        assert effects == ()
        if self.owner is not None:
            self.fences[self.granted[-1]] = ["cpu"]
        self.do(machine.PoolTick())

    # -- what is told

    def do(self, event: machine.Event) -> tuple[machine.Effect, ...]:
        self.state, effects = machine.step(self.state, event, self.now_s)
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
            case machine.CpuFence(session, epoch):
                assert not self.can_queue(epoch), "a predecessor can still queue work"
                assert self.fences.setdefault(epoch, []) == []
                self.fences[epoch].append("cpu")
            case machine.GrantPool(session, epoch, made_epoch):
                self.hear_grant(session, epoch, made_epoch)
            case machine.GpuFence(session, epoch):
                assert self.owner == session
                assert epoch == self.granted[-1]
                assert not self.can_land(epoch), "queued work can still land"
                assert self.fences[epoch] == ["cpu"]
                self.fences[epoch].append("gpu")
            case machine.Orphaned(epoch):
                assert epoch == self.granted[-1]
                assert self.owner is not None, "it is told once"
                self.owner = None
            case machine.DropPool(epoch):
                assert epoch == self.granted[-1]
                assert self.owner is None, "its end must be told first"
                self.pool = None
            case machine.PoolTimedOut(session):
                assert self.waiting.pop(session).deadline_s <= self.now_s
            case machine.RefusePool(session, code):
                # A refused join of one who waits answers the join, not the wait.
                if code is machine.PoolRefusal.STALE_EPOCH and session in self.waiting and self.overtaken(session):
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
        assert len(self.state.mappers) == len(used)

    @invariant()
    def the_phase_is_what_was_told(self) -> None:
        expected = "OWNED" if self.owner is not None else "ABSENT" if self.pool is None else "ORPHANED"
        assert repr(self.state).startswith(expected)
        due_s = machine.next_deadline_s(self.state)
        assert due_s is None or due_s > self.now_s

    def teardown(self) -> None:
        """Every waiter comes to an end by time alone."""
        for _ in range(len(self.waiting) + 1):
            if (due_s := machine.next_deadline_s(self.state)) is not None:
                self.now_s = due_s
                self.do(machine.PoolTick())
        assert not self.waiting


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


OWNS_A_POOL = (machine.MapperJoined(1, None, 7), machine.PoolRequested(1, 100, "g1", 9.0), machine.PoolMade(1, 100))


def after(*events: machine.Event) -> machine.PoolState:
    state = machine.PoolState()
    for event in events:
        state, _ = machine.step(state, event, 0.0)
    return state


def refusals(effects: tuple[machine.Effect, ...]) -> list[machine.PoolRefusal]:
    return [effect.code for effect in effects if isinstance(effect, machine.RefusePool)]


def test_a_process_may_vouch_for_a_connection_it_has_closed() -> None:
    """An owner that reconnected instead of dying ends the wait for its own end by quiescing its old epoch."""
    state = after(*OWNS_A_POOL, machine.ClientGone(1), machine.MapperJoined(2, None, 7))
    state, effects = machine.step(state, machine.PoolRequested(2, 101, "g2", 9.0), 0.0)
    assert effects == ()
    state, effects = machine.step(state, machine.OwnerQuiesced(2, 100), 0.0)
    assert effects == (
        machine.DropPool(100),
        machine.CpuFence(2, 101),
        machine.GrantPool(2, 101, made_epoch=0),
        machine.GpuFence(2, 101),
    )


def test_everything_a_session_maps_with_counts_under_its_epoch() -> None:
    """A process named later, and one named under the epoch, both keep the GPU fence closed until they are over."""
    joins = machine.MapperJoined(1, None, 8), machine.MapperJoined(1, 100, 9), machine.MapperJoined(2, None, 20)
    state = after(*OWNS_A_POOL, *joins, machine.ClientGone(1))
    state, effects = machine.step(state, machine.PoolRequested(2, 101, "g1", 9.0), 0.0)
    assert effects == (machine.CpuFence(2, 101), machine.GrantPool(2, 101, made_epoch=100))
    for process in (7, 9):
        state, effects = machine.step(state, machine.ProcessOver(process), 0.0)
        assert effects == ()
    state, effects = machine.step(state, machine.ProcessOver(8), 0.0)
    assert effects == (machine.GpuFence(2, 101),)


def test_seats_and_waiters_are_bounded() -> None:
    """One more than the bound is refused by name."""
    state = after(*(machine.MapperJoined(session, None, session) for session in range(machine.MAPPERS_MAX)))
    assert refusals(machine.step(state, machine.MapperJoined(5000, None, 5000), 0.0)[1]) == [
        machine.PoolRefusal.TOO_MANY
    ]
    state, _ = machine.step(state, machine.PoolRequested(0, 1, "g1", 9.0), 0.0)
    for session in range(1, machine.WAITERS_MAX + 1):
        state, effects = machine.step(state, machine.PoolRequested(session, 1 + session, "g1", 9.0), 0.0)
        assert effects == ()
    assert refusals(machine.step(state, machine.PoolRequested(1000, 1000, "g1", 9.0), 0.0)[1]) == [
        machine.PoolRefusal.TOO_MANY
    ]


def test_a_donation_needs_an_empty_place_and_a_newer_epoch() -> None:
    """After a total loss the owner goes on owning; with a pool here, or a larger epoch, it is told that it is over."""
    state = after(machine.MapperJoined(1, None, 7))
    assert refusals(machine.step(state, machine.PoolDonated(2, 100, "g1", 100), 0.0)[1]) == [
        machine.PoolRefusal.NOT_REGISTERED
    ]
    for made_epoch in (0, -1, 101):
        assert refusals(machine.step(state, machine.PoolDonated(1, 100, "g1", made_epoch), 0.0)[1]) == [
            machine.PoolRefusal.NOT_GRANTED
        ]
    owned, effects = machine.step(state, machine.PoolDonated(1, 100, "g1", 90), 0.0)
    assert effects == (
        machine.CpuFence(1, 100),
        machine.GrantPool(1, 100, made_epoch=90),
        machine.TellPoolMade(90),
        machine.GpuFence(1, 100),
    )
    owned, _ = machine.step(owned, machine.MapperJoined(2, None, 8), 0.0)
    assert refusals(machine.step(owned, machine.PoolDonated(2, 99, "g1", 90), 0.0)[1]) == [
        machine.PoolRefusal.STALE_EPOCH
    ]
    assert refusals(machine.step(owned, machine.PoolDonated(2, 101, "g1", 90), 0.0)[1]) == [
        machine.PoolRefusal.POOL_HERE
    ]


def test_a_restored_pool_without_an_owner_must_be_complete() -> None:
    """A vault and an owner that died together while the pool was being made: it is dropped, not adopted."""
    state, effects = machine.restore(100, machine.PoolPages("g1"), None, ())
    assert effects == (machine.DropPool(100),)
    assert (state.phase, state.last_epoch) == ("ABSENT", 100)


OWNED = machine.Mapper(1, 7, 100)


@pytest.mark.parametrize(
    ("state", "heard"),
    [
        (machine.PoolState(), []),
        (machine.PoolState(100, machine.PoolPages("g1"), 1, mappers=(OWNED,)), [("granted", 100)]),
        (machine.PoolState(100, machine.PoolPages("g1", 90), 1, mappers=(OWNED,)), [("granted", 100), ("made", 90)]),
        (machine.PoolState(100, machine.PoolPages("g1", 90)), [("made", 90), ("owner_gone", 100)]),
        (machine.PoolState(100), [("owner_gone", 100), ("dropped", 100)]),
    ],
)
def test_who_comes_late_hears_how_the_pool_stands(state: machine.PoolState, heard: list[tuple[str, int]]) -> None:
    """Each phase of the pool has its news, and the owner's end is among it whenever nobody owns."""
    assert [(news.kind, news.epoch) for news in machine.missed(state)] == heard
