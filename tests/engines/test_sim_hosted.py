"""The sim over a real vault: what it survives and what not (vanished vaults, ranks, direct memory, sleep), and what its
tokens depend on. What it has in common with every engine is in test_engine_contract.py."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing.processes import KEEPER, VAULT
from tests.rigs.agents import OrderFailed
from tests.rigs.engines.any_engine import BOUND_S, PATIENT, SETTINGS, Child, Vault, request
from tests.rigs.engines.sim_engine import expected

PROMPT = [100 + place for place in range(70)]
RIGHT = expected(request(PROMPT, 20), 20)
BLOCKS = 5  # whole ones of that stream
TIGHT_MIB = 24  # weights and pool
PRIVATE_BYTES = 2 * 1024 * 1024  # a slab for a page of its own


async def served(engine: Child, number: int) -> None:
    """A stream through it, with the right tokens."""
    await engine.submit(number, PROMPT, 20)
    await engine.until(lambda: number in engine.finished)
    assert engine.said[number] == RIGHT


def mapped_bytes(pid: int) -> int:
    """Of slabs, the vault's and its own."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd" in line]
    ranges = [line[0].split("-") for line in lines]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


async def test_open_blocks_are_kept_away_from_until_the_gpu_fence(vault: Vault) -> None:
    """Past the CPU fence an adopter serves, but not from blocks the earlier owner had open; those come free once its
    process is over."""
    async with vault.engine(0, tpot_ms=5.0) as owner, vault.engine(1) as standby:
        await owner.do("wake", epoch=1000)
        await served(owner, 1)
        await owner.submit(2, PROMPT, 20_000)
        await owner.until(lambda: 2 in owner.said)
        await owner.do("hang_up")
        assert (await standby.do("wake", epoch=1001))["blocks"] >= 5
        await served(standby, 1)
        facts = await standby.do("facts")
        assert (facts["gpu_fence"], facts["quarantined"] > 0) == (False, True)
        await owner.kill()
        await standby.until_facts(lambda facts: facts["gpu_fence"] and not facts["quarantined"])
        await served(standby, 2)


async def test_owner_told_of_a_newer_epoch_ends_at_once(vault: Vault) -> None:
    """Vault and keeper were lost, and while it was frozen another one was elected: it may not go on as if it led."""
    async with vault.engine(0) as owner, vault.engine(1) as standby:
        await owner.do("wake", epoch=1000)
        os.kill(owner.pid, signal.SIGSTOP)
        vault.kill(VAULT, KEEPER)
        await vault.come_back()
        await standby.do("wake", epoch=1001)
        os.kill(owner.pid, signal.SIGCONT)
        facts = await owner.until_facts(lambda facts: any(kind == "fatal" for kind, _ in facts["told"]))
        assert any(kind == "fatal" and why.startswith("deposed") for kind, why in facts["told"])
        assert not any(kind == "fatal" for kind, _ in (await standby.do("facts"))["told"])


async def test_direct_memory_waits_for_the_gpu_fence(vault: Vault) -> None:
    """With KV in memory of its own an engine adopts nothing, is not awake while the earlier owner's process exists,
    and serves once it is over."""
    async with vault.engine(0) as owner, vault.engine(1, kv="direct") as direct:
        await owner.do("wake", epoch=1000)
        await served(owner, 1)
        await owner.do("hang_up")  # past the CPU fence
        waking = direct.order("wake", epoch=1001)
        await asyncio.wait([waking], timeout=0.3)
        assert not waking.done()
        await owner.kill()
        async with asyncio.timeout(BOUND_S):
            assert (await waking)["blocks"] == 0
        assert (await direct.do("facts"))["gpu_fence"]
        await served(direct, 2)
        await direct.do("become_standby")
        assert (await direct.do("wake", epoch=1002))["blocks"] == 0
        await served(direct, 3)


async def test_unmapped_standby_maps_again_when_it_wakes(vault: Vault) -> None:
    """Asleep it has nothing mapped but its own private slab, and a fault of its memory is refused by name; awake it has
    the same bytes at the same addresses, and serves from the pool."""
    async with vault.engine(0) as owner, vault.engine(1, standby="unmapped") as sleeper:
        await owner.do("wake", epoch=1000)
        assert mapped_bytes(owner.pid) > PRIVATE_BYTES
        await served(owner, 1)
        before = await sleeper.do("facts")
        assert before["asleep"]
        assert mapped_bytes(sleeper.pid) == PRIVATE_BYTES
        assert await sleeper.do("check") == ""
        with pytest.raises(OrderFailed, match="memory_flip: this engine has no weights mapped"):
            await sleeper.do("fault", fault="memory_flip")
        waking = sleeper.order("wake", epoch=1001)
        await owner.kill()
        async with asyncio.timeout(BOUND_S):
            assert (await waking)["blocks"] == 5
        assert (await sleeper.do("facts"))["address"] == before["address"]
        await served(sleeper, 2)
        await sleeper.do("become_standby")
        assert (await sleeper.do("facts"))["asleep"]


@pytest.mark.long
async def test_unmapped_standby_refills_an_empty_vault(vault: Vault) -> None:
    """An engine that prefers to read loads where nobody else does; vault and keeper died while nobody had anything
    mapped: whoever is elected loads the weights again, at once."""
    async with vault.engine(1, standby="unmapped") as sleeper:
        vault.kill(VAULT, KEEPER)
        watching = asyncio.ensure_future(vault.processes[0].watch())
        try:
            assert (await sleeper.do("wake", epoch=1001))["blocks"] == 0
            await served(sleeper, 1)
        finally:
            watching.cancel()


async def test_vault_and_owner_killed_together(vault: Vault) -> None:
    """The wake waits for the vault to be back, then adopts what the keeper kept."""
    async with vault.engine(0) as owner, vault.engine(1) as standby:
        await owner.do("wake", epoch=1000)
        await served(owner, 1)
        vault.kill(VAULT)
        waking = standby.order("wake", epoch=1001)
        await owner.kill()
        async with asyncio.timeout(BOUND_S):
            assert (await waking)["blocks"] == 5
        await served(standby, 2)


async def test_everything_of_the_vault_lost_then_the_owner() -> None:
    """Vault and keeper die: what is mapped is given back, and a standby goes on from it after the owner's death."""
    with Vault(**PATIENT) as vault:
        async with vault.engine(0) as owner, vault.engine(1) as standby:
            await owner.do("wake", epoch=1000)
            await served(owner, 1)
            vault.kill(VAULT, KEEPER)
            watching = asyncio.ensure_future(vault.processes[0].watch())
            try:
                for engine in (owner, standby):
                    await engine.until_facts(lambda facts: ["memory", ""] in facts["told"])
                await owner.kill()
                assert (await standby.do("wake", epoch=1001))["blocks"] == 5
                await served(standby, 2)
            finally:
                watching.cancel()


async def test_rank_that_outlives_its_parent_keeps_lock_and_fence_closed(vault: Vault, tmp_path: Path) -> None:
    """A rank that is left behind holds the election lock and the CPU fence; once it is gone both are open."""
    lock = tmp_path / "lock"
    async with vault.engine(0, ranks=2, ranks_die=False) as owner, vault.engine(1, wake_s=5.0) as standby:
        fd = await owner.do("open_lock", path=str(lock))
        await owner.do("wake", epoch=1000, fds=[fd])
        (rank,) = (await owner.do("facts"))["ranks"]
        os.kill(rank, signal.SIGSTOP)  # or it would see that its engine is gone
        try:
            await owner.kill()
            with lock.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(OrderFailed, match="TimeoutError"):
                await standby.do("wake", epoch=1001)
        finally:
            os.kill(rank, signal.SIGKILL)
        await standby.do("wake", epoch=1002)
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_ranks_die_with_their_engine_and_it_with_them(vault: Vault, tmp_path: Path) -> None:
    """A rank's death is fatal to its engine; an engine's death ends its ranks and frees the lock; a rest hands both
    over."""
    lock = tmp_path / "lock"
    async with vault.engine(0, ranks=3) as owner, vault.engine(1, ranks=2) as standby:
        fd = await owner.do("open_lock", path=str(lock))
        await owner.do("wake", epoch=1000, fds=[fd])
        await owner.do("become_standby")
        await standby.do("wake", epoch=1001)
        await served(standby, 1)
        (rank,) = (await standby.do("facts"))["ranks"]
        os.kill(rank, signal.SIGKILL)
        told = await standby.until_facts(lambda facts: any(kind == "fatal" for kind, _ in facts["told"]))
        assert f"rank process {rank} is gone" in str(told["told"])
        await standby.kill()
        await owner.do("wake", epoch=1002, fds=[fd])
        await owner.kill()
    with lock.open() as file:
        async with asyncio.timeout(BOUND_S):
            while not _free(file.fileno()):
                await asyncio.sleep(0.01)


def _free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def test_wakes_fail_and_hang_on_command(vault: Vault) -> None:
    """wake_fails fails one wake, the next succeeds; wake_hangs never returns; a device error is fatal at once."""
    async with vault.engine(0) as engine:
        await engine.do("fault", fault="wake_fails")
        with pytest.raises(OrderFailed, match="wake_fails"):
            await engine.do("wake", epoch=1000)
        await engine.do("wake", epoch=1001)
        await engine.do("become_standby")
        await engine.do("fault", fault="wake_hangs")
        waking = engine.order("wake", epoch=1002)
        await engine.do("fault", fault="device_error")
        assert any(kind == "fatal" for kind, _ in (await engine.do("facts"))["told"])
        assert not waking.done()


async def test_a_poisoned_request_kills_whoever_runs_it(vault: Vault) -> None:
    """The poison token ends the engine that runs it, and no other request does."""
    async with vault.engine(0, poison_token=77) as engine:
        await engine.do("wake", epoch=1000)
        await served(engine, 1)
        await engine.submit(2, [5, 77], 5)
        async with asyncio.timeout(BOUND_S):
            await engine.process.wait()
        assert engine.process.returncode == -signal.SIGKILL


async def test_other_weights_are_replaced(vault: Vault) -> None:
    """An engine that finds other weights than its own loads its own beside them, and serves; who has the old ones
    mapped keeps them, and does not put them back."""
    async with vault.engine(0) as first, vault.engine(1, vault_gib=0.008) as other:
        await other.do("wake", epoch=1000)
        await other.submit(1, PROMPT, 20)
        await other.until(lambda: 1 in other.finished)
        assert other.said[1] == expected(request(PROMPT, 20), 20)
        assert await first.do("check") == ""
        assert not any(kind == "memory" for kind, _ in (await first.do("facts"))["told"])
    assert vault.log.read_text().count("committed generation") == 2


async def test_a_lost_pool_is_computed_again(vault: Vault) -> None:
    """What is not in the pool is counted as computed again: the whole text but its last position."""
    async with vault.engine(0) as engine:
        await engine.do("wake", epoch=1000)
        prompt = PROMPT
        text = expected(request(prompt, 80), 80)
        await engine.submit(1, prompt + text[:50], 80, prompt_len=len(prompt))
        await engine.until(lambda: 1 in engine.finished)
        assert engine.said[1] == text[50:]
        assert (await engine.do("facts"))["recomputed"] == len(prompt) + 50 - 1


async def test_flipped_weights_make_wrong_tokens_and_fail_the_canary(vault: Vault) -> None:
    """Weights that do not read as they should show in streams and in the canary, until the fault is cleared."""
    async with vault.engine(0) as engine:
        await engine.do("wake", epoch=1000)
        right = expected(request([5, 6, 7], 20), 20)
        for number, (fault, good) in enumerate(((None, True), ("memory_flip", False), ("clear", True))):
            if fault:
                await engine.do("fault", fault=fault)
            await engine.submit(number, [5, 6, 7], 20)
            await engine.until(lambda number=number: number in engine.finished)
            assert (engine.said[number] == right) is good
            assert (await engine.do("check") == "") is good
        await engine.do("fault", fault="wrong_tokens")
        assert await engine.do("check")


# -- what adopters make of it when those before them died: of the pool, of the weights, and of the count itself


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    """A vault with room for weights, pool and the pool's index, and none for the weights once more."""
    monkeypatch.setitem(SETTINGS["sim"], "vault_gib", TIGHT_MIB / 1024)
    with Vault(budget_bytes=(TIGHT_MIB + 4) * 1024**2) as started:
        yield started


def vouches(facts: dict[str, Any]) -> bool:
    """Whether its last word on its memory is that it was verified."""
    return [why for kind, why in facts["told"] if kind == "memory"][-1:] == [""]


async def deaths(vault: Vault, count: int, epoch: int = 1000) -> None:
    """So many leaders, one after the other, each killed before its canary's word."""
    for place in range(count):
        async with vault.engine(place + 1) as engine:
            await engine.do("wake", epoch=epoch + place)
            await served(engine, 1)


@pytest.mark.long
async def test_deaths_after_adoptions_empty_the_pool_then_doubt_the_weights(vault: Vault) -> None:
    """The first adopter believes the pool, the second (no canary since) believes nothing, the third verifies the
    weights, which are right and stay; with nothing left to doubt the count begins anew: the next one believes again."""
    rungs = [(0, "", False), (BLOCKS, "", False), (0, "no canary", False), (0, "no canary", True), (BLOCKS, "", False)]
    for epoch, (blocks, reason, doubted) in enumerate(rungs, 1000):
        async with vault.engine(epoch - 999) as engine:
            woken = await engine.do("wake", epoch=epoch)
            assert (woken["blocks"], reason in woken["reason"]) == (blocks, True)
            assert bool(woken["reason"]) is bool(reason)
            facts = await engine.do("facts")
            assert bool([why for kind, why in facts["told"] if kind == "loading"]) is doubted
            await served(engine, 1)
    assert "generation 2" not in vault.log.read_text()


@pytest.mark.long
async def test_any_number_of_deaths_is_survived_where_two_copies_do_not_fit(tight: Vault) -> None:
    """Nine leaders die one after the other, three times as many as it takes to doubt the weights, in a vault with room
    for one copy of them: every adopter wakes and serves, and a standby that watched it all does so at the end."""
    async with tight.engine(0) as watcher:
        await deaths(tight, 9)
        await watcher.do("wake", epoch=2000)
        await served(watcher, 2)
    assert "writes generation 2" not in tight.log.read_text()


@pytest.mark.long
async def test_damaged_weights_are_replaced_in_place_where_two_copies_do_not_fit(tight: Vault) -> None:
    """The third adopter finds its weights damaged and no room beside them: standbys are asked to let go, the weights
    are dropped and written anew, everybody maps the new ones, and the next death is one like any other."""
    async with tight.engine(0) as watcher:
        await deaths(tight, 3)
        async with tight.engine(8) as adopter:
            await adopter.do("damage")
            await adopter.do("wake", epoch=1500)
            await served(adopter, 1)
        told = (await watcher.until_facts(vouches))["told"]
        assert ["memory", "the weights were replaced"] in told
        assert await watcher.do("check") == ""
        woken = await watcher.do("wake", epoch=1501)
        assert (woken["blocks"], woken["reason"]) == (BLOCKS, "")
        await served(watcher, 2)
    log = tight.log.read_text()
    assert log.index("generation 1 is dropped") < log.index("committed generation 3")


async def test_damaged_weights_are_replaced_beside_where_both_fit(vault: Vault) -> None:
    """With room for both nobody is asked to let go: a standby keeps its own until the new ones are committed."""
    async with vault.engine(0) as watcher:
        await deaths(vault, 3)
        async with vault.engine(8) as adopter:
            await adopter.do("damage")
            await adopter.do("wake", epoch=1500)
            await watcher.until_facts(lambda facts: ["memory", "the weights were replaced"] in facts["told"])
            await served(adopter, 1)
        await watcher.until_facts(vouches)
        await watcher.do("wake", epoch=1501)
        await served(watcher, 2)
    log = vault.log.read_text()
    assert log.index("committed generation 2") < log.index("generation 1 is dropped")
