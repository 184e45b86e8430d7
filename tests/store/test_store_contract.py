"""What every kind of store promises, checked against real server processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.store.contract import WATCHES_MAX, Deleted, Lost, Put, Snapshot, Store, update_record
from tests.rigs.store.stores import (
    BOUND_S,
    Rig,
    end,
    has,
    items_under,
    registered,
    registrant,
    rig_for,
    unavailable,
    until,
    until_snapshot,
    upcoming,
)

pytestmark = pytest.mark.processes
every_kind = pytest.mark.parametrize("unstarted", ["unix", "tcp", "etcd"], indirect=True)


@pytest.fixture(params=["unix", "etcd"])
async def unstarted(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = rig_for(request.param, tmp_path)
    yield rig
    end(rig.process)


@pytest.fixture
async def rig(unstarted: Rig) -> Rig:
    await unstarted.start()
    return unstarted


@pytest.fixture
async def store(rig: Rig) -> AsyncIterator[Store]:
    async with rig.opened() as client:
        yield client


async def test_get_put_delete_prefix(store: Store) -> None:
    """What is put is there, what is deleted is not, and a prefix takes exactly its own keys."""
    assert await store.get("a/1", BOUND_S) is None
    await store.put("a/1", b"one", BOUND_S)
    await store.put("a/2", b"", BOUND_S)
    await store.put("a", b"\x00\xff", BOUND_S)
    await store.put("b/1", b"other", BOUND_S)
    assert await store.get("a/1", BOUND_S) == b"one"
    assert await store.get("a/2", BOUND_S) == b""
    assert await items_under(store, "a/") == {"a/1": b"one", "a/2": b""}
    assert await items_under(store, "") == {"a": b"\x00\xff", "a/1": b"one", "a/2": b"", "b/1": b"other"}
    await store.delete("a/1", BOUND_S)
    await store.delete("a/1", BOUND_S)
    assert await items_under(store, "a/") == {"a/2": b""}
    assert store.state == "connected"
    assert "connected" in repr(store)


async def test_a_swap_changes_what_is_as_expected(rig: Rig, store: Store) -> None:
    """A key that is another, or there, or not there, is left as it is; asked again, the answer is the same."""
    assert not await store.swap("s/1", b"new", b"old", BOUND_S)
    assert await store.get("s/1", BOUND_S) is None
    assert await store.swap("s/1", b"one", None, BOUND_S)
    assert not await store.swap("s/1", b"two", None, BOUND_S)
    assert await store.swap("s/1", b"one", None, BOUND_S), "it has what was asked for"
    assert await store.swap("s/1", b"two", b"one", BOUND_S)
    assert not await store.swap("s/1", b"three", b"one", BOUND_S)
    assert await store.swap("s/1", b"", b"two", BOUND_S)
    assert await store.swap("s/1", b"four", b"", BOUND_S)
    async with rig.opened() as other:
        assert await other.get("s/1", BOUND_S) == b"four"


async def test_a_swap_removes_what_is_as_expected(store: Store) -> None:
    """What is another stays; what is not there any more is removed."""
    await store.put("s/1", b"one", BOUND_S)
    assert not await store.swap("s/1", None, b"two", BOUND_S)
    assert not await store.swap("s/1", None, b"", BOUND_S)
    assert await store.get("s/1", BOUND_S) == b"one"
    assert await store.swap("s/1", None, b"one", BOUND_S)
    assert await store.get("s/1", BOUND_S) is None
    assert await store.swap("s/1", None, b"one", BOUND_S), "it has what was asked for"
    assert await store.swap("s/1", None, None, BOUND_S)
    assert await items_under(store, "s/") == {}


async def test_of_swaps_at_once_one_succeeds(rig: Rig, store: Store) -> None:
    """Ten clients that change one record at the same time lose none of the changes."""

    async def add(client: Store, letter: bytes) -> None:
        await update_record(client, "s/all", lambda before: (before or b"") + letter, BOUND_S)

    async with rig.opened() as other, asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(add((store, other)[number % 2], bytes([97 + number])))
    assert sorted(await store.get("s/all", BOUND_S) or b"") == list(b"abcdefghij")


async def test_large_prefix_comes_whole(store: Store) -> None:
    """More than fits into one frame, or one answer of etcd's gateway, still is one snapshot."""
    items = {f"big/{index}": bytes([index]) * 1024 * 1024 for index in range(10)}
    for key, value in items.items():
        await store.put(key, value, BOUND_S)
    assert await items_under(store, "big/") == items


async def test_every_watch_sees_every_change_in_order(rig: Rig, store: Store) -> None:
    """A watch begins with a snapshot; then all watchers, in one client or another, see the same changes."""
    await store.put("w/0", b"0", BOUND_S)
    other = rig.client()
    await other.start()
    watches = [store.watch("w/"), store.watch("w/"), other.watch("w/")]
    for watch in watches:
        assert await upcoming(watch) == Snapshot({"w/0": b"0"})
    await store.put("x/elsewhere", b"", BOUND_S)
    for index in range(20):
        await store.put("w/1", str(index).encode(), BOUND_S)
    await store.delete("w/0", BOUND_S)
    for watch in watches:
        assert [await upcoming(watch) for _ in range(21)] == [
            *(Put("w/1", str(index).encode()) for index in range(20)),
            Deleted("w/0"),
        ]
    await other.close()
    with pytest.raises(StopAsyncIteration):
        await upcoming(watches[2])


async def test_registration_lives_and_goes(rig: Rig, store: Store) -> None:
    """A registered key follows updates, is gone when withdrawn, and may be registered again."""
    watch = store.watch("r/")
    assert await upcoming(watch) == Snapshot({})
    registration = await registered(store, "r/1", b"a")
    with pytest.raises(ValueError, match="r/1"):
        store.register("r/1", b"again")
    for value in (b"b", b"c", b"d"):
        registration.update(value)
    await has(store, "r/1", b"d")
    await registration.withdraw()
    await registration.withdraw()
    assert await store.get("r/1", BOUND_S) is None
    store.register("r/1", b"new")
    seen = await until(watch, lambda event: event == Put("r/1", b"new"))
    assert seen[0] == Put("r/1", b"a")
    assert seen[-2] == Deleted("r/1")


async def test_close_drops_keys_promptly(rig: Rig, store: Store) -> None:
    """A client that says goodbye takes its keys along at once, without waiting for a lease to end."""
    rig.ttl_s = int(2 * BOUND_S)
    async with rig.opened() as other:
        await registered(other, "r/1", b"a")
        watch = store.watch("r/")
        assert await upcoming(watch) == Snapshot({"r/1": b"a"})
    assert await upcoming(watch) == Deleted("r/1")
    await other.close()
    await unavailable(other.get("r/1", 2 * BOUND_S))


async def test_newer_registrant_keeps_the_key(rig: Rig, store: Store) -> None:
    """When two clients register one key the last one holds it, and the first one's end does not take it away."""
    async with rig.opened() as first:
        registration = await registered(first, "r/1", b"first")
        await registered(store, "r/1", b"second")
        await registration.withdraw()
        assert await store.get("r/1", BOUND_S) == b"second"
    assert await store.get("r/1", BOUND_S) == b"second"


async def test_killed_client_loses_its_keys(rig: Rig, store: Store) -> None:
    """SIGKILL of a registrant ends its lease: the embedded store tells at once, etcd after the TTL."""
    process = await registrant(rig)
    try:
        await has(store, "r/1", b"mine")
        watch = store.watch("r/")
        assert await upcoming(watch) == Snapshot({"r/1": b"mine"})
        process.kill()
        assert await upcoming(watch) == Deleted("r/1")
    finally:
        end(process)


@every_kind
async def test_killed_server_comes_back(rig: Rig, store: Store) -> None:
    """After SIGKILL and restart the same client is connected, registered and watching again; durable keys survive."""
    await store.put("d/1", b"kept", BOUND_S)
    registration = await registered(store, "d/2", b"leased")
    watch = store.watch("d/")
    assert await upcoming(watch) == Snapshot({"d/1": b"kept", "d/2": b"leased"})
    rig.kill()
    assert isinstance(await upcoming(watch), Lost)
    assert store.state == "lost"
    error = await unavailable(store.get("d/1", 0.3))
    assert rig.url in str(error)
    await unavailable(store.put("d/1", b"kept", 0.3))
    registration.update(b"newer")
    store.register("d/4", b"late")
    await rig.start()
    everything = {"d/1": b"kept", "d/2": b"newer", "d/4": b"late"}
    seen = await until_snapshot(watch, everything)
    assert isinstance(seen[0], Snapshot)
    assert not any(isinstance(event, Lost) for event in seen)
    assert await items_under(store, "d/") == everything


@every_kind
async def test_frozen_server_thaws(rig: Rig, store: Store) -> None:
    """A frozen server is lost after ~3 s, once; calls fail in their own time; after the thaw everything goes on."""
    registration = await registered(store, "f/1", b"a")
    watch = store.watch("f/")
    assert await upcoming(watch) == Snapshot({"f/1": b"a"})
    rig.freeze()
    try:
        await unavailable(store.get("f/1", 0.3))
        assert isinstance(await upcoming(watch), Lost)
        assert store.state == "lost"
        # A client that opens now finds nobody, and does not mind.
        newcomer = rig.client()
        await newcomer.start()
        new_watch = newcomer.watch("f/")
        registration.update(b"b")
    finally:
        rig.thaw()
    seen = await until_snapshot(watch, {"f/1": b"b"})
    assert isinstance(seen[0], Snapshot)
    assert not any(isinstance(event, Lost) for event in seen)
    await until_snapshot(new_watch, {"f/1": b"b"})
    await newcomer.close()
    assert await store.get("f/1", BOUND_S) == b"b"
    assert store.state == "connected"


async def test_withdrawn_during_a_freeze_is_gone_after(rig: Rig, store: Store) -> None:
    """A withdrawal that the store cannot take now returns in bounded time and is done after the thaw."""
    registration = await registered(store, "f/1", b"a")
    watch = store.watch("f/")
    assert await upcoming(watch) == Snapshot({"f/1": b"a"})
    rig.freeze()
    try:
        await asyncio.wait_for(registration.withdraw(), BOUND_S)
    finally:
        rig.thaw()
    await until_snapshot(watch, {})


async def test_client_before_server(unstarted: Rig) -> None:
    """A client may be opened, registered and watching before its store exists."""
    client = unstarted.client()
    await client.start()
    assert client.state == "connecting"
    client.register("e/1", b"a")
    watch = client.watch("e/")
    await unstarted.start()
    await until_snapshot(watch, {"e/1": b"a"})
    await client.close()


async def test_own_freeze_is_no_outage(rig: Rig, store: Store) -> None:
    """A client that was itself stopped for longer than the limit does not take that for the store's outage."""
    await registered(store, "o/1", b"mine")
    watch = store.watch("o/")
    assert await upcoming(watch) == Snapshot({"o/1": b"mine"})
    time.sleep(4.2)  # noqa: ASYNC251  our own event loop is what stands still
    await store.put("o/2", b"after", BOUND_S)
    seen = await until(watch, lambda event: event == Put("o/2", b"after"))
    assert not any(isinstance(event, Lost) for event in seen)
    assert store.state == "connected"


async def test_overflow_gives_a_snapshot(rig: Rig) -> None:
    """A consumer that falls behind gets the truth as a snapshot, not a gap and not unbounded memory."""
    async with rig.opened(queue_events_max=8) as client:
        slow, fast = client.watch("q/"), client.watch("q/")
        assert await upcoming(slow) == Snapshot({})
        assert await upcoming(fast) == Snapshot({})
        for index in range(20):
            await client.put(f"q/{index}", b"", BOUND_S)
            assert await upcoming(fast) == Put(f"q/{index}", b"")
        async with asyncio.timeout(BOUND_S):
            while not slow._overflowed:  # type: ignore[attr-defined]
                await asyncio.sleep(0.005)  # etcd tells each watch in its own time
        assert await upcoming(slow) == Snapshot({f"q/{index}": b"" for index in range(20)})
        await client.delete("q/0", BOUND_S)
        assert await upcoming(slow) == Deleted("q/0")


async def test_closed_watch_ends_and_frees_its_place(store: Store) -> None:
    """A watch that is closed ends, and closing makes room: opening and closing many never hits the limit."""
    for _ in range(100):
        watch = store.watch("c/")
        await watch.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
    kept = store.watch("c/")
    assert await upcoming(kept) == Snapshot({})
    for _ in range(WATCHES_MAX - 1):
        store.watch("c/")
    with pytest.raises(ValueError, match="watches"):
        store.watch("c/")


async def test_limits_name_the_field(store: Store) -> None:
    """Keys and values over their limits are refused before they are sent, by name; those at the limit are taken."""
    with pytest.raises(ValueError, match="key of 513 bytes"):
        await store.get("k" * 513, BOUND_S)
    with pytest.raises(ValueError, match="key must not be empty"):
        await store.delete("", BOUND_S)
    with pytest.raises(ValueError, match="key is not valid Unicode"):
        await store.put("\ud800", b"", BOUND_S)
    with pytest.raises(ValueError, match="value of 1048577 bytes"):
        await store.put("k", b"v" * (1024 * 1024 + 1), BOUND_S)
    with pytest.raises(ValueError, match="value of"):
        store.register("k", b"v" * (1024 * 1024 + 1))
    with pytest.raises(ValueError, match="prefix of"):
        store.watch("p" * 513)
    largest = b"v" * 1024 * 1024
    await store.put("k" * 512, largest, BOUND_S)
    assert await store.get("k" * 512, BOUND_S) == largest
