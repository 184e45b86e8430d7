"""Two engines, one or two devices, real processes and real deaths: who writes, who waits, who reads."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.memory.client.calls import VaultRefused
from holdfast.testing.processes import fd_count
from holdfast.testing.waiting import BOUND_S
from tests.rigs.agents import OrderFailed
from tests.rigs.memory.vaults import SOON_MS, Rig, digest, expected, facts, load, until, write

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("orders", "first"), [(("01", "10"), 0), (("01", "10"), 1), (("10", "01"), 1)])
async def test_with_roles_and_lock_two_engines_on_two_devices_both_get_ready(
    orders: tuple[str, str], first: int
) -> None:
    """In whatever order they start and ask, one writes everything, the other reads everything."""
    devices = [[f"host-{number}" for number in order] for order in orders]
    with Rig(("host-0", "host-1")) as rig:
        async with rig.engine(0) as zero, rig.engine(1) as one:
            engines = [zero, one] if first == 0 else [one, zero]
            ready = [engine.order("become_ready", devices=devices[0 if engine is zero else 1]) for engine in engines]
            done = await asyncio.wait_for(asyncio.gather(*ready), BOUND_S)
            assert sorted(done) == ["wrote ", "wrote host-0,host-1"]
            sums = [await engine.do("digest", device=f"host-{n}") for engine in engines for n in (0, 1)]
            assert sums == [expected(7)] * 4


async def test_writer_killed_between_two_devices_is_restarted_and_all_finish() -> None:
    """Device 0 is committed, 1 not: the other engine's wait survives; the new writer reads 0 and writes 1."""
    both = ["host-0", "host-1"]
    with Rig(("host-0", "host-1")) as rig:
        async with rig.engine(1) as one:
            ready = one.order("become_ready", devices=both, grace_s=2 * BOUND_S)
            async with rig.engine(0) as zero:
                with pytest.raises(OrderFailed, match="Died"):
                    await zero.do("become_ready", devices=both, die_after="host-0")
            assert not ready.done()
            async with rig.engine(0) as again:
                assert await again.do("become_ready", devices=both) == "wrote host-1"
                assert await asyncio.wait_for(ready, BOUND_S) == "wrote "
                for device in both:
                    assert await one.do("digest", device=device) == await again.do("digest", device=device)


async def test_writer_killed_before_commit_leaves_nothing(rig: Rig) -> None:
    """What it had handed over is gone, and the next one in the queue writes."""
    async with rig.engine(0) as writer, rig.client(1) as other:
        await writer.do("open")
        assert await writer.do("acquire", mode="rw") == "rw"
        await writer.do("load")
        assert (await facts(other))["weights_bytes"] > 0
        waiting = asyncio.ensure_future(other.acquire("rw_or_ro", SOON_MS))
        await rig.shows(waiting=1)
        await writer.kill()
        assert await waiting == "rw"
        assert (await facts(other))["weights_bytes"] == 0
        await load(other, 2)
        await other.commit()
        assert digest(other) == expected(2)


async def test_queued_client_that_is_killed_leaves_the_queue(rig: Rig) -> None:
    """It is granted nothing, and whoever comes after it is not held up by it (facts 17)."""
    async with rig.client(0) as writer, rig.engine(1) as queued:
        assert await writer.acquire("rw", SOON_MS) == "rw"
        await queued.do("open")
        waiting = queued.order("acquire", mode="rw", timeout_ms=SOON_MS)
        await rig.shows(waiting=1)
        await queued.kill()
        with pytest.raises(OrderFailed, match="Died"):
            await waiting
        await load(writer)
        await writer.commit()
        seen = await facts(writer)
        assert (seen["waiting"], seen["readers"], len(seen["clients"])) == (0, 1, 1)


async def test_replacement_needs_the_hash_and_never_delays_a_reader(rig: Rig) -> None:
    """Without the hash of what is there: refused. While it is written, readers get the old one at once."""
    async with rig.client(0) as writer, rig.client(1) as reader, rig.client(2) as replacer, rig.client(3) as late:
        old = await write(writer)
        for wrong in (None, "0" * 32):
            with pytest.raises(VaultRefused) as refused:
                await replacer.acquire("rw", SOON_MS, replace=wrong)
            assert refused.value.code == ("committed" if wrong is None else "stale")
        assert await replacer.acquire("rw", SOON_MS, replace=old) == "rw"
        await load(replacer, 2)
        assert await reader.acquire("ro", SOON_MS) == "ro"
        assert digest(reader) == expected(1)
        noticed: list[object] = []
        reader.on_notice = noticed.append
        await replacer.commit()
        assert await late.acquire("ro", SOON_MS) == "ro"
        assert digest(late) == expected(2)
        assert digest(reader) == digest(writer) == expected(1)
        await until(lambda: noticed, "the reader is told that newer weights are here")
        before = (await facts(late))["weights_bytes"]
        await asyncio.gather(reader.release(), writer.release())
        assert (await facts(late))["weights_bytes"] == before // 2, "the old one is dropped with its last reader"


async def test_replacement_that_does_not_fit_the_budget_is_refused() -> None:
    """Both must fit; if not, the old one stays as it is."""
    with Rig(budget_bytes=3 * 1024 * 1024) as rig:
        async with rig.client(0) as writer, rig.client(1) as replacer:
            old = await write(writer)
            assert await replacer.acquire("rw", SOON_MS, replace=old) == "rw"
            with pytest.raises(VaultRefused) as refused:
                await load(replacer, 2)
            assert refused.value.code == "over_budget"
            await replacer.release()
            assert await replacer.acquire("ro", SOON_MS) == "ro"
            assert digest(replacer) == expected(1)


async def test_cancelled_waits_leak_nothing(rig: Rig) -> None:
    """Neither descriptors here or there, nor waiters, nor locks: also where the answer crosses the cancellation."""
    async with rig.client(0) as writer, rig.client(1) as waiter:
        await writer.acquire("rw", SOON_MS)
        vault = rig.pids("server")[0]
        before = (fd_count(), fd_count(vault))
        for _ in range(50):
            waiting = asyncio.ensure_future(waiter.acquire("ro", SOON_MS))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await rig.shows(waiting=0)
        await until(lambda: fd_count() <= before[0] and fd_count(vault) <= before[1], "nothing is left open")
        await load(writer)
        await writer.commit()
        held = fd_count()
        for turn in range(60):  # now it is granted at once: the cancellation meets the answer at every place
            waiting = asyncio.ensure_future(waiter.acquire("ro", SOON_MS))
            for _ in range(turn % 12):
                await asyncio.sleep(0.0002)
            waiting.cancel()
            outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if outcome == "ro":
                await waiter.release()
            await rig.shows(readers=1)
        await until(lambda: fd_count() <= held, "nothing is left of the answers")
        assert await waiter.acquire("ro", SOON_MS) == "ro"


async def test_many_connections_leave_nothing_behind(rig: Rig) -> None:
    """A client that comes, asks and goes costs the vault no descriptor and no record."""
    async with rig.client(0) as writer:
        await write(writer)
        vault, keeper = rig.pids("server")[0], rig.pids("keeper")[0]
        before = (fd_count(vault), fd_count(keeper))
        for _ in range(30):
            async with rig.client(1) as reader:
                assert await reader.acquire("ro", SOON_MS) == "ro"
        await until(lambda: fd_count(vault) <= before[0] and fd_count(keeper) <= before[1], "all is closed")
