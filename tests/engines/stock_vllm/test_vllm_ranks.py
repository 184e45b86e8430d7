"""A vLLM engine of two ranks says what one of one rank says, lives and dies as one, and leaves its KV to the next."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import Refused
from holdfast.engines.host.pool import index_of
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import FULL, Index
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.spec.engines import FailoverSettings, VllmSettings
from holdfast.testing.processes import children_of
from tests.rigs.engines.any_engine import BOUND_S, VLLM_OPTIONS, Child, Vault

pytest.importorskip("vllm.version", reason="vllm is not installed here: make test-vllm")
# Up to four processes import vLLM at once.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

BLOCK = 32
TOKENS = 120
LENGTHS = (3, 49, 90, 177)
OPTIONS = [*VLLM_OPTIONS, "--tensor-parallel-size", "2"]
SHARED = Path("/dev/shm")

Said = dict[int, list[int]]


def prompts(turn: int) -> dict[int, list[int]]:
    """Streams of one round; no two rounds share a block."""
    numbers = {10 * turn + at: length for at, length in enumerate(LENGTHS, 1)}
    return {number: [(7 * number + 13 * at) % 990 + 2 for at in range(size)] for number, size in numbers.items()}


def sampling(number: int) -> dict[str, float]:
    return {"temperature": 0.8 if number % 2 else 0.0, "seed": number}


@pytest.fixture
def vaults() -> Iterator[Vault]:
    with Vault(devices=2) as started:
        yield started


def group(vaults: Vault, engine_id: int) -> Child:
    return Child(vaults, engine_id, "vllm", options=OPTIONS, slow=True)


async def submit(engine: Child, turn: int, said: Said) -> None:
    for number, text in prompts(turn).items():
        given = sampling(number) | {"prompt_len": len(text)}
        await engine.submit(number, text + said.get(number, []), TOKENS, **given)


async def run(engine: Child, turn: int, said: Said) -> Said:
    """Go on with every stream after what clients saw of it; all that they have in the end."""
    await submit(engine, turn, said)
    await engine.until(lambda: engine.finished.keys() >= prompts(turn).keys())
    return {number: said.get(number, []) + engine.said[number] for number in prompts(turn)}


async def begun(engine: Child, turn: int, tokens: int) -> None:
    await submit(engine, turn, {})
    await engine.until(lambda: all(len(engine.said.get(number, ())) >= tokens for number in prompts(turn)))


async def wake(engine: Child, epoch: int) -> dict[str, Any]:
    woken: dict[str, Any] = await engine.do("wake", epoch=epoch)
    await engine.do("vouch")  # else the next one would not believe what it adopts
    return woken


def whole(said: Said) -> int:
    """Blocks that are full of what clients have seen."""
    texts = {number: text for turn in range(4) for number, text in prompts(turn).items()}
    return sum((len(texts[number]) + len(tokens) - 1) // BLOCK for number, tokens in said.items())


async def gone(pid: int) -> None:
    """Wait until a process is over."""
    await reached(pid, "Z")


async def reached(pid: int, state: str) -> None:
    """Wait until a process is in a state, as /proc names it."""
    async with asyncio.timeout(BOUND_S):
        while _state(pid) != state:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def stopped(owner: Child) -> AsyncIterator[None]:
    """Stop an engine and its ranks, so that none of them writes its index meanwhile."""
    pids = [*(await owner.do("facts"))["ranks"], owner.process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        await reached(pid, "T")
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@asynccontextmanager
async def rank_1(vaults: Vault, owner: Child) -> AsyncIterator[Index]:
    """The index of the second rank's pool."""
    path, device = vaults.places[1]
    geometry = replace(Geometry(**json.loads((await owner.do("facts"))["geometry"])), rank=1)
    client = MemoryClient(path, open_device(device), 7)
    await client.connect()
    mapping = await PoolClient(client, open_device("host-0")).stand_by()
    assert mapping is not None
    index = index_of(mapping, geometry)
    assert index is not None
    try:
        yield index
    finally:
        index.close()
        await client.close()


def full(index: Index) -> list[int]:
    entries = {block: index.entry(block) for block in range(index.geometry.block_count)}
    return [block for block, entry in entries.items() if entry.state == FULL and entry.whole]


async def test_two_ranks_say_what_one_says(vaults: Vault) -> None:
    """Mixed streams get the same tokens from two ranks as from one; what was shown is published on every rank; a
    standby of two ranks answers its canary beside it; a planned handover, there and back, leaves all blocks."""
    with Vault() as vault:
        async with vault.engine(0, "vllm") as one:
            await wake(one, 1000)
            right = await run(one, 0, {})
    async with vaults.children(group(vaults, 0), group(vaults, 1)) as (first, second):
        assert await wake(first, 1000) == {"blocks": 0, "reason": ""}
        assert await run(first, 0, {}) == right
        async with rank_1(vaults, first) as index:
            assert len(full(index)) == whole(right), "what was shown is not published on every rank"
        assert await second.do("check") == ""
        await first.do("become_standby")
        assert await wake(second, 1001) == {"blocks": whole(right), "reason": ""}
        await second.do("become_standby")
        assert await first.do("check") == ""
        assert await wake(first, 1002) == {"blocks": whole(right), "reason": ""}


async def test_whichever_rank_ends_streams_go_on(vaults: Vault) -> None:
    """SIGKILL one rank in mid-stream, first the other, then the leader; then stop the other and kill the leader, as a
    supervisor does with an engine that stands still. Every time the engine ends with all its ranks, and the next goes
    on with every stream, token for token, computing no more than a block of any again. A block that is not whole on one
    rank is used by none, though the leader has it."""
    before = set(os.listdir(SHARED))
    async with vaults.children(group(vaults, 0), group(vaults, 1)) as (first, second):
        await wake(first, 1000)
        right = {turn: await run(first, turn, {}) for turn in range(3)}
        first.said.clear()
        await begun(first, 0, 15)
        waking = second.order("wake", epoch=1001)
        (rank,) = (await first.do("facts"))["ranks"]
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(BOUND_S):
            await first.ended()
        assert await taken_over(first, second, waking, 0, right) <= BLOCK
        async with vaults.children(group(vaults, 2)) as (third,):
            await begun(second, 1, 15)
            async with rank_1(vaults, second) as index, stopped(second):
                for block in full(index):
                    index.free(block)
            recomputed = await killed(second, third, 1002, 1, right, signal.SIGKILL)
            assert recomputed >= max(LENGTHS), "a spoilt block was used"
            async with vaults.children(group(vaults, 3)) as (fourth,):
                await begun(third, 2, 15)
                assert await killed(third, fourth, 1003, 2, right, signal.SIGSTOP) <= BLOCK
    left = set(os.listdir(SHARED)) - before
    assert not {name for name in left if name.startswith("holdfast")}


async def killed(owner: Child, standby: Child, epoch: int, turn: int, right: dict[int, Said], how: int) -> int:
    """The leader ends by SIGKILL, after its rank was sent another signal, if it is another."""
    waking = standby.order("wake", epoch=epoch)
    (rank,) = (await owner.do("facts"))["ranks"]
    if how != signal.SIGKILL:
        os.kill(rank, how)
    children = children_of(owner.process.pid)
    await owner.kill()
    for pid in {rank, *children}:
        await gone(pid)
    return await taken_over(owner, standby, waking, turn, right)


async def taken_over(
    owner: Child, standby: Child, waking: asyncio.Future[Any], turn: int, right: dict[int, Said]
) -> int:
    """How much of a stream was computed again, at most."""
    async with asyncio.timeout(BOUND_S):
        woken = await waking
    assert woken["reason"] == ""
    await standby.do("vouch")
    said = {number: owner.said[number] for number in prompts(turn)}
    assert all(len(tokens) < TOKENS for tokens in said.values()), "the end came too late to mean anything"
    assert await run(standby, turn, said) == right[turn]
    facts = await standby.until_facts(lambda facts: facts["gpu_fence"] and not facts["quarantined"])
    assert facts["resumed"] == len(LENGTHS)
    recomputed: int = facts["recomputed"]
    return recomputed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size is 2, but there are vaults for 1"),
        (("--tensor-parallel-size", "3"), "must be divisible by tensor parallel size"),
        (("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"), "only --tensor-parallel-size is served"),
    ],
)
def test_what_ranks_cannot_share_is_refused(options: tuple[str, ...], said: str) -> None:
    """By name, before anything is started."""
    from tests.rigs.engines.vllm_models import made, set_variables

    set_variables()
    from holdfast.engines.vllm.engine import vllm_engine

    with pytest.raises((ValueError, Refused), match=said):
        vllm_engine(
            str(made("llama")), "tiny", (), VllmSettings(kv_gib=0.03, options=options), FailoverSettings("none")
        )
