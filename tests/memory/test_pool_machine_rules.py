"""Rules of the KV pool's machine that take several steps to see, one by one."""

from __future__ import annotations

from holdfast.memory import pool_machine as machine
from holdfast.memory.pool_machine import (
    Acquire,
    Code,
    CpuFence,
    Donate,
    DropPool,
    Gone,
    GpuFence,
    GrantPool,
    MapperJoined,
    Pages,
    Pool,
    PoolMade,
    ProcessOver,
    Quiesced,
    Refuse,
    restore,
    step,
)


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
    assert effects == (DropPool(100), CpuFence(2, 101), GrantPool(2, 101, adopt=False), GpuFence(2, 101))


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
    assert effects == (CpuFence(2, 101), GrantPool(2, 101, adopt=True))
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
    assert refusals(step(state, Donate(2, 100, "g1"), 0.0)[1]) == [Code.NOT_REGISTERED]
    owned, effects = step(state, Donate(1, 100, "g1"), 0.0)
    assert effects == (CpuFence(1, 100), GrantPool(1, 100, adopt=True), GpuFence(1, 100))
    owned, _ = step(owned, MapperJoined(2, None, 8), 0.0)
    assert refusals(step(owned, Donate(2, 99, "g1"), 0.0)[1]) == [Code.STALE_EPOCH]
    assert refusals(step(owned, Donate(2, 101, "g1"), 0.0)[1]) == [Code.POOL_HERE]


def test_a_restored_pool_without_an_owner_must_be_complete() -> None:
    """A vault and an owner that died together while the pool was being made: it is dropped, not adopted."""
    state, effects = restore(100, Pages("g1", made=False), None, ())
    assert effects == (DropPool(100),)
    assert (state.phase, state.last_epoch) == ("ABSENT", 100)
