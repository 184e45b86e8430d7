"""An engine of two ranks says what one of one rank says, lives and dies as one, and leaves its KV to the next group."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engines.host.pool import index_of
from holdfast.engines.torch.engine import torch_engine
from holdfast.engines.torch.files.resolve import tiny
from holdfast.engines.torch.geometry import pool_geometry
from holdfast.kv.geometry import block_keys
from holdfast.kv.index import FULL, Index
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.spec.engines import FailoverSettings, TorchSettings
from holdfast.testing.processes import KEEPER, VAULT
from tests.rigs.engines.any_engine import BOUND_S, PATIENT, Child, Vault
from tests.rigs.engines.torch_engine import BLOCK, BLOCK_GIB, SETTINGS, prompt, request, rig

LENGTHS = (3, 49, 90, 177)  # with TOKENS, the longest's last step fills a block
ROUNDS = 3
TOKENS = 48
SEEN = 8  # tokens of every stream that clients had for certain when something ended

NAN_BYTE = 0xFF  # four of them are a float that is not a number

Said = dict[int, list[int]]


def prompts(turn: int) -> dict[int, list[int]]:
    """Streams of one round; no two rounds share a block."""
    return {10 * turn + at: prompt(length, 10 * turn + at) for at, length in enumerate(LENGTHS)}


def sampling(number: int) -> dict[str, float]:
    return {"temperature": 0.8 if number % 2 else 0.0, "seed": number}


@pytest.fixture
def vaults() -> Iterator[Vault]:
    with Vault(devices=2, **PATIENT) as started:
        yield started


@asynccontextmanager
async def groups(vaults: Vault, count: int) -> AsyncIterator[tuple[Child, ...]]:
    """Engines of two ranks each, loaded and standing by."""
    kv_gib = 256 * BLOCK_GIB  # 512 blocks of half the heads on each rank
    async with vaults.children(*(Child(vaults, at, "torch", kv_gib=kv_gib) for at in range(count))) as made:
        yield made


async def gone(pid: int) -> None:
    """Wait until a process is over."""
    async with asyncio.timeout(BOUND_S):
        while _lives(pid):
            await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # nobody may read it yet
    except OSError:
        return False


@pytest.fixture(scope="module")
def unbroken() -> Said:
    """What an engine of one rank says that nobody kills."""

    async def run() -> Said:
        with Vault() as vault:
            async with rig(vault) as r:
                texts = {number: text for turn in range(ROUNDS) for number, text in prompts(turn).items()}
                await r.run({number: request(text, TOKENS, **sampling(number)) for number, text in texts.items()})
                return {number: r.tokens(number) for number in texts}

    return asyncio.run(run())


async def wake(group: Child, epoch: int) -> dict[str, Any]:
    woken: dict[str, Any] = await group.do("wake", epoch=epoch)
    await group.do("vouch")  # else the next one would not believe what it adopts
    return woken


async def run_to(owner: Child, turn: int, tokens: int) -> None:
    for number, text in prompts(turn).items():
        await owner.submit(number, text, TOKENS, **sampling(number))
    await owner.until(lambda: all(len(owner.said.get(number, [])) >= tokens for number in prompts(turn)))


async def resume(seen: Said, standby: Child, turn: int) -> Said:
    """Go on with every stream after what clients saw of it; all that they have in the end."""
    texts = prompts(turn)
    for number, text in texts.items():
        given = sampling(number) | {"prompt_len": len(text)}
        await standby.submit(number, text + seen[number], TOKENS, **given)
    await standby.until(lambda: standby.finished.keys() >= texts.keys())
    return {number: seen[number] + standby.said[number] for number in texts}


def of(turn: int, said: Said) -> Said:
    return {number: said[number] for number in prompts(turn)}


def whole(owner: Child, *turns: int) -> int:
    """Blocks that are full of what clients have seen."""
    texts = {number: text for turn in turns for number, text in prompts(turn).items()}
    return sum((len(text) + len(owner.said[number]) - 1) // BLOCK for number, text in texts.items())


async def ended(group: Child) -> None:
    async with asyncio.timeout(BOUND_S):
        await group.ended()


@pytest.mark.long
async def test_two_ranks_say_what_one_says(vaults: Vault, unbroken: Said) -> None:
    """Mixed streams (greedy and not, long and short) get the same tokens from two ranks as from one; a planned
    handover, there and back, leaves all their blocks to the next. A vault that died alone is no matter; one that came
    back with nothing gets back what the engine has mapped, and ends it: the standby goes on from there. Numbers that
    are not finite on one rank end the engine, and none of their tokens are said."""
    async with groups(vaults, 2) as (first, second):
        await wake(first, 1000)
        await run_to(first, 0, TOKENS)
        assert of(0, first.said) == of(0, unbroken)
        async with rank_1(vaults) as (index, _):
            assert len(full(index)) == whole(first, 0), "what was shown is not published on every rank"
        assert await second.do("check") == ""
        await first.do("become_standby")
        assert await wake(second, 1001) == {"blocks": whole(first, 0), "reason": ""}
        await second.do("become_standby")
        vaults.kill(VAULT, device=1)  # its keeper starts it again
        assert await first.do("check") == ""
        assert await wake(first, 1002) == {"blocks": whole(first, 0), "reason": ""}
        await run_to(first, 1, SEEN)
        assert first.alive
        vaults.kill(VAULT, KEEPER, device=1)
        await vaults.come_back(1)
        await ended(first)
        assert (await wake(second, 1003))["blocks"] >= whole(first, 0, 1)
        seen = {number: tokens[:SEEN] for number, tokens in first.said.items()}  # it may have gone on to their ends
        assert await resume(seen, second, 1) == of(1, unbroken)
        assert (await second.do("facts"))["recomputed"] <= BLOCK
        text = prompt(BLOCK + 3, 99)
        await second.submit(99, text, 3000, temperature=0.0)
        await second.until(lambda: len(second.said.get(99, [])) >= 2)
        async with rank_1(vaults) as (index, damage):
            damage(full(index)[block_keys(index.geometry.root(), text[:BLOCK], BLOCK)[0]], NAN_BYTE)
            await ended(second)
        assert len(second.said[99]) < 3000
        assert 0 not in second.said[99], "what is not a number was drawn from"


@pytest.mark.long
async def test_whichever_rank_is_killed_streams_go_on(vaults: Vault, unbroken: Said) -> None:
    """SIGKILL one rank in mid-stream, first one of the others, then the leader: the engine ends with all its ranks, and
    the next group goes on with every stream, token for token, computing less than a block of any again. But a block
    that is not whole on one rank is used by none, though the leader has it."""
    async with groups(vaults, 3) as (first, second, third):
        await wake(first, 1000)
        await run_to(first, 0, 15)
        waking = second.order("wake", epoch=1001)
        (rank,) = (await first.do("facts"))["ranks"]
        os.kill(rank, signal.SIGKILL)
        await ended(first)
        facts = await taken_over(first, second, waking, 0, unbroken)
        assert facts["recomputed"] <= BLOCK

        await run_to(second, 2, 15)
        longest = max(prompts(2).values(), key=len)
        await spoil_on_rank_1(vaults, longest)
        waking = third.order("wake", epoch=1002)
        (rank,) = (await second.do("facts"))["ranks"]
        await second.kill()
        await gone(rank)
        facts = await taken_over(second, third, waking, 2, unbroken)
        assert facts["recomputed"] >= len(longest), "the spoilt block was used"
        others = len(LENGTHS) - 1
        assert facts["recomputed_total"] - facts["recomputed"] <= others * BLOCK


async def taken_over(
    owner: Child, standby: Child, waking: asyncio.Future[Any], turn: int, unbroken: Said
) -> dict[str, Any]:
    async with asyncio.timeout(BOUND_S):
        woken = await waking
    assert woken["reason"] == ""
    assert woken["blocks"] >= whole(owner, turn) - 1
    await standby.do("vouch")
    assert not owner.finished.keys() & prompts(turn).keys(), "the end came too late to mean anything"
    assert await resume(owner.said, standby, turn) == of(turn, unbroken)
    facts = await standby.until_facts(lambda facts: facts["gpu_fence"] and not facts["quarantined"])
    assert facts["resumed"] == len(LENGTHS)
    return facts


@asynccontextmanager
async def rank_1(vaults: Vault) -> AsyncIterator[tuple[Index, Callable[..., None]]]:
    """The index of the second rank's pool, and a way to damage a block's pages there."""
    path, device = vaults.places[1]
    settings = TorchSettings(**(SETTINGS | {"kv_gib": 256 * BLOCK_GIB, "ranks": 2}))
    geometry = pool_geometry(tiny(), settings, torch.float32, rank=1)
    client = MemoryClient(path, open_device(device), 9)
    await client.connect(BOUND_S)
    mapping = await PoolClient(client, open_device("host-0")).stand_by()
    assert mapping is not None
    index = index_of(mapping, geometry)
    assert index is not None

    def damage(block: int, byte: int = 0) -> None:
        at, size = mapping.pages_address + block * geometry.block_bytes, geometry.block_bytes
        client.device.write(at, bytes([byte]) * size)

    try:
        yield index, damage
    finally:
        index.close()
        await client.close()


def full(index: Index) -> dict[bytes, int]:
    """Key and block of all that is whole."""
    entries = {block: index.entry(block) for block in range(index.geometry.block_count)}
    return {entry.key: block for block, entry in entries.items() if entry.state == FULL and entry.whole}


async def spoil_on_rank_1(vaults: Vault, text: list[int]) -> None:
    """The first block of a text there: its pages are other bytes, its entry is free."""
    async with rank_1(vaults) as (index, damage):
        block = full(index)[block_keys(index.geometry.root(), text[:BLOCK], BLOCK)[0]]
        damage(block)
        index.free(block)


def test_ranks_without_vaults_of_their_own_are_refused() -> None:
    """Two ranks on one vault's place are refused by name."""
    with pytest.raises(ValueError, match="ranks is 2, but there are vaults for 1"):
        torch_engine(tiny(), TorchSettings(**SETTINGS, ranks=2), FailoverSettings("none"), lambda *_: None)
