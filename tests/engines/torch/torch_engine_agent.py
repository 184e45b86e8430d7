"""A torch engine of the tests, from inside: `python torch_engine_agent.py '{"socket": …}'`.

It takes orders as JSON lines [number, name, arguments] and answers each with [number, result, error]; orders run side
by side. What its engine says of streams goes out as [0, stream, tokens, finish], written before the sink returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import uvloop
from torch_rig import request

from holdfast.core.requests import Output
from holdfast.engines.shadow.place import Place
from holdfast.engines.torch.engine import TorchEngine
from holdfast.engines.torch.files.tiny import tiny
from holdfast.engines.torch.settings import TorchSettings
from holdfast.kv.geometry import block_keys
from holdfast.kv.index import (
    ENTRY_WORDS,
    EPOCH,
    FREE,
    FULL,
    HEADER_WORDS,
    KEY_HIGH,
    KEY_LOW,
    SHAPE,
    STATE_BITS,
    SUM,
    Index,
)
from holdfast.kv.pool import Pool

OUT = os.dup(1)  # the pipe ends with this process


class Agent:
    """What an engine child can do; one method per order."""

    def __init__(self, launch: dict[str, Any]) -> None:
        place = Place(launch["socket"], engine_id=launch["engine_id"], who=f"engine {launch['engine_id']}")
        self.engine = TorchEngine(tiny(), TorchSettings(**launch["settings"]), place, lambda *_: None)

    async def load(self) -> None:
        await self.engine.load()
        await self.engine.start(self._sink, lambda streams: None)

    def _sink(self, outputs: list[Output]) -> bool:
        for output in outputs:
            say(0, output.stream, output.tokens, output.finish)
        return True

    async def wake(self, epoch: int) -> dict[str, Any]:
        woken = await self.engine.wake(epoch)
        return {"blocks": woken.blocks, "reason": woken.reason}

    async def check(self) -> bool:
        return await self.engine.check()

    async def submit(self, stream: int, tokens: list[int], max_tokens: int, given: dict[str, Any]) -> None:
        self.engine.submit(stream, request(tokens, max_tokens, **given))

    async def facts(self) -> dict[str, Any]:
        engine, blocks = self.engine, self.engine._blocks
        return {
            "recomputed": engine.resumes.recomputed_tokens_max,
            "resumed": blocks.resumes.resumed_total if blocks else 0,
            "found": blocks.found_tokens_total if blocks else 0,
            "full": len(self._full()) if blocks else 0,
            "quarantined": self._pool.quarantined_count if blocks else 0,
            "gpu_fence": engine.gpu_fence.is_set(),
            "follower": repr(engine.memory._follower),
        }

    @property
    def _pool(self) -> Pool:
        assert self.engine.memory.owned is not None
        return self.engine.memory.owned.pool

    @property
    def _index(self) -> Index:
        return self._pool.index

    def _full(self) -> list[int]:
        return [block for block in range(self._index.geometry.block_count) if self._index.state(block) == FULL]

    async def damage_pages(self) -> int:
        """Make every FULL block's first numbers others; says how many blocks those were."""
        memory, blocks = self.engine.memory, self._full()
        assert memory.owned is not None
        for block in blocks:
            at = memory.owned.pages_address + block * memory.geometry.block_bytes
            size = memory.geometry.block_bytes // 2
            memory.device.write(at, bytes(byte ^ 0x55 for byte in memory.device.read(at, size)))
        return len(blocks)

    async def damage_entries(self) -> int:
        """What no adopter may believe, a different harm to each FULL entry in turn: a flipped bit in one of its words,
        a later generation's word, another block's entry. All their pages are damaged too: belief would show."""
        blocks, words = self._full(), self._index.words
        await self.damage_pages()
        for place, block in enumerate(blocks):
            at, harm = HEADER_WORDS + block * ENTRY_WORDS, place % (SUM + 3)
            if harm <= SUM:
                words[at + harm] ^= 1 << 9
            elif harm == SUM + 1:
                words[at] += 1 << STATE_BITS
            else:
                other = HEADER_WORDS + blocks[place - 1] * ENTRY_WORDS
                for word in range(ENTRY_WORDS):
                    words[at + word] = words[other + word]
        return len(blocks)

    async def plant(self, tokens: list[int]) -> int:
        """Name free blocks as those of a text, with everything right but the sum; says how many."""
        geometry, index = self._index.geometry, self._index
        keys = block_keys(geometry.root(), tokens, geometry.block_tokens)
        free = [block for block in range(geometry.block_count) if index.state(block) == FREE]
        for depth, key in enumerate(keys):
            at = HEADER_WORDS + free[depth] * ENTRY_WORDS
            low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
            for word, value in ((KEY_LOW, low), (KEY_HIGH, high), (EPOCH, self._pool.epoch)):
                index.words[at + word] = value
            index.words[at + SHAPE] = depth << 32 | geometry.block_tokens
            index.words[at] = index.words[at] | FULL
        return len(keys)


def say(*words: Any) -> None:
    os.write(OUT, json.dumps(words).encode() + b"\n")


async def obey(launch: dict[str, Any]) -> None:
    agent = Agent(launch)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()

    async def carry_out(number: int, name: str, arguments: dict[str, Any]) -> None:
        result, error = None, None
        try:
            result = await getattr(agent, name)(**arguments)
        except Exception as failed:  # the root of an order: its giver is told
            error = f"{type(failed).__name__}: {failed}"
        say(number, result, error)

    while line := await reader.readline():
        task = asyncio.create_task(carry_out(*json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    os.dup2(2, 1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as workers do
        runner.run(obey(json.loads(sys.argv[1])))
