"""Rules of the KV pool's machine that take several steps to see, one by one."""

from __future__ import annotations

import pytest

from holdfast.memory.vault import pool_machine as machine
from holdfast.memory.vault.pool_machine import (
    Acquire,
    Code,
    CpuFence,
    Donate,
    DropPool,
    Gone,
    GpuFence,
    GrantPool,
    Made,
    MapperJoined,
    Pages,
    Pool,
    PoolMade,
    ProcessOver,
    Quiesced,
    Refuse,
    Seat,
    restore,
    step,
)
from holdfast.memory.vault.pool_news import missed


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
