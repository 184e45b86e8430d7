"""vLLM engines with KV of their own (`--kv direct`), of kinds that nobody could take over: killed under streams, they
are followed by a standby that computes the streams anew, and goes on with the unbroken run's tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.kv.index import Misuse
from tests.rigs.engines.any_engine import Child, Vault
from tests.rigs.engines.vllm_models import made

pytest.importorskip("vllm.version", reason="vllm is not installed here: make test-vllm")
pytestmark = pytest.mark.processes

TOKENS = 90
SEEN = 20  # of every stream, when its engine is killed
PROMPT = 150  # over twice as far as a sliding layer sees
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11, "top_k": 40},
    {"temperature": 1.0, "seed": 12, "top_p": 0.9, "frequency_penalty": 0.3},
]
PROMPTS = {n: [2 + (37 * n + 31 * at * at + 101 * at) % 900 for at in range(PROMPT + n)] for n in (1, 2, 3)}
EAGER = ["--enforce-eager"]


async def submit(engine: Child, said: dict[int, list[int]]) -> None:
    for number, prompt in PROMPTS.items():
        text = prompt + said.get(number, [])
        await engine.submit(number, text, TOKENS, prompt_len=len(prompt), **SAMPLINGS[number - 1])


async def to_the_end(engine: Child, said: dict[int, list[int]]) -> dict[int, list[int]]:
    await submit(engine, said)
    await engine.until(lambda: engine.finished.keys() >= PROMPTS.keys())
    return {number: said.get(number, []) + engine.said.pop(number) for number in PROMPTS}


def own_blocks(count: int = 20, private: int = 3) -> tuple[Any, Any]:
    from vllm.v1.core.block_pool import BlockPool

    from holdfast.engines.vllm.direct import OwnBlocks

    pool = BlockPool(count, enable_caching=True, hash_block_size=32)
    return pool, OwnBlocks(pool, private)


def test_only_private_blocks_are_handed_out_without_a_pool() -> None:
    """The first ones, again and again; with a pool all of them, once more after every wake."""
    pool, blocks = own_blocks()
    for _ in range(4):
        taken = pool.get_new_blocks(3)
        assert sorted(block.block_id for block in taken) == [1, 2, 3]
        assert (blocks.use().blocks, blocks.use().held, pool.get_num_free_blocks()) == (3, 3, 0)
        pool.free_blocks(taken)
        blocks.attach(None)
        everything = pool.get_new_blocks(19)
        assert len({block.block_id for block in everything}) == 19
        assert (blocks.use().blocks, blocks.use().held) == (19, 19)
        pool.free_blocks(everything[::-1])
        blocks.detach()


def test_what_was_computed_before_a_pool_is_not_found_in_it() -> None:
    """Nor what was computed in the last one."""
    pool, blocks = own_blocks()
    request: Any = SimpleNamespace(block_hashes=[b"a" * 32, b"b" * 32])
    for change in (lambda: blocks.attach(None), blocks.detach, lambda: blocks.attach(None)):
        taken = pool.get_new_blocks(2)
        pool.cache_full_blocks(request, taken, 0, 2, 32, 0)
        assert pool.get_cached_block(b"a" * 32, [0]) is not None
        pool.free_blocks(taken)
        change()
        assert pool.get_cached_block(b"a" * 32, [0]) is None


def test_blocks_in_use_are_not_moved_about() -> None:
    """Whoever forgot a stream is told, and nothing has changed for it."""
    pool, blocks = own_blocks()
    held = pool.get_new_blocks(1)
    with pytest.raises(Misuse, match="private blocks are in use"):
        blocks.attach(None)
    pool.free_blocks(held)
    _, others = own_blocks()
    others.attach(None)
    with pytest.raises(Misuse, match="a pool already"):
        others.attach(None)
    held = others._own.get_new_blocks(5)
    with pytest.raises(Misuse, match="still in use"):
        others.detach()
    others._own.free_blocks(held)
    others.detach()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", EAGER),
        ("gemma3", EAGER),  # two groups of layers, one of them with sliding windows
        pytest.param("gemma3", [*EAGER, "--no-enable-prefix-caching"], marks=pytest.mark.long),
    ],
    ids=["full", "sliding", "no names"],
)
async def test_a_standby_computes_the_streams_of_the_killed_anew(family: str, options: list[str], vault: Vault) -> None:
    """Weights are written once. The standby has its canary in blocks of its own, without memory under the others; woken
    it takes nothing over, finds nothing of what it computed before, and says every stream's tokens as the first engine
    would have. It may rest and be woken again."""
    made(family)
    settings: dict[str, Any] = {"family": family, "options": options, "kv": "direct"}
    async with vault.pair("vllm", slow=True, **settings) as (first, second):
        assert await second.do("check") == ""
        await first.do("wake", epoch=100)
        right = await to_the_end(first, {})
        first.finished.clear()
        await submit(first, {})
        await first.until(lambda: all(len(first.said.get(number, ())) >= SEEN for number in PROMPTS))
        await first.kill()
        woken = await second.do("wake", epoch=101)
        assert (woken["blocks"], vault.commits()) == (0, 1)
        await second.do("prove")
        said = {number: first.said[number] for number in PROMPTS}
        assert await to_the_end(second, said) == right
        facts = await second.until_facts(lambda facts: facts["proven"])
        assert facts["resumed"] == len(PROMPTS)
        assert facts["recomputed"] >= PROMPT
        await second.do("become_standby")
        assert await second.do("check") == ""
        second.finished.clear()
        await second.do("wake", epoch=102)
        assert await to_the_end(second, {}) == right
