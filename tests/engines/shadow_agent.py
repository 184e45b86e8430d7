"""A shadow engine of the tests, from inside: `python shadow_agent.py '{"socket": …}'`.

It takes orders as JSON lines [number, name, arguments] and answers each with [number, result, error]; orders run side
by side. What its engine says of streams goes out as [0, stream, tokens, finish], written before the sink returns.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import sys
from typing import Any

import uvloop
from sim_rig import request

from holdfast.core.requests import Output
from holdfast.engines.shadow.place import Place
from holdfast.engines.sim import SimSettings, parse_fault
from holdfast.engines.sim.shadow import ShadowSim
from holdfast.memory.client.mapped import Mapped

OUT = os.dup(1)  # not inherited by ranks: the pipe ends with this process


class Agent:
    """What an engine child can do; one method per order."""

    def __init__(self, launch: dict[str, Any]) -> None:
        shadow = Place(launch["socket"], **launch["shadow"])
        self.engine = ShadowSim(SimSettings(**launch["sim"]), random.Random(1), shadow)
        self.engine.ranks.dies_with_parent = launch["ranks_die"]
        self.engine.on_memory = lambda why: self.told.append(["memory", why])
        self.engine.on_owner_gone = lambda epoch: self.told.append(["owner_gone", ""])
        self.engine.on_fatal = lambda why: self.told.append(["fatal", why])
        self.engine.on_loading = lambda why: self.told.append(["loading", why])
        self.told: list[list[str]] = []

    async def load(self) -> str:
        await self.engine.load()
        await self.engine.start(self._sink, lambda streams: say(0, 0, streams, "closed"))
        return repr(self.engine.memory)

    def _sink(self, outputs: list[Output]) -> bool:
        for output in outputs:
            say(0, output.stream, output.tokens, output.finish)
        return True

    async def wake(self, epoch: int, fds: list[int] | None = None) -> dict[str, Any]:
        woken = await self.engine.wake(epoch, tuple(fds or ()))
        return {"blocks": woken.blocks, "reason": woken.reason, "marks": dict(woken.marks)}

    async def rest(self) -> None:
        await self.engine.rest()

    async def check(self) -> bool:
        return await self.engine.check()

    async def passed(self) -> None:
        self.engine.canary_passed()

    async def submit(self, stream: int, tokens: list[int], max_tokens: int, prompt_len: int) -> None:
        self.engine.submit(stream, request(tokens, max_tokens, prompt_len=prompt_len))

    async def fault(self, **command: Any) -> None:
        self.engine.inject(parse_fault(command))

    async def open_lock(self, path: str) -> int:
        """A file whose flock this process holds."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    async def facts(self) -> dict[str, Any]:
        engine, memory = self.engine, self.engine.memory
        pool = memory.owned.pool if memory.owned is not None else None
        return {
            "recomputed": engine.resumes.recomputed_tokens_max,
            "resumed": engine.resumes.resumed_total,
            "gpu_fence": engine.gpu_fence.is_set(),
            "quarantined": pool.quarantined_count if pool else 0,
            "last_epoch": engine.last_epoch,
            "told": self.told,
            "ranks": engine.ranks.pids,
            "reloaded": memory.owned.weights_reloaded if memory.owned is not None else False,
            "asleep": memory.asleep,
            "connected": memory.client.connected,
            "address": memory.client.mapped.address if memory.client.mapped else 0,
            "follower": repr(memory._follower),
        }

    async def hang_up(self) -> None:
        """Make no more steps and close the connection to the vault, but live on: what was queued may still land."""
        self.engine.inject(parse_fault({"fault": "wedge"}))
        await self.engine.memory.close()

    async def damage(self) -> None:
        """Its next look at the weights finds them damaged. Committed slabs are sealed: nothing can damage them here."""
        verify = self.engine.weights.verify

        def wrong(mapped: Mapped) -> str:
            self.engine.weights.verify = verify  # type: ignore[method-assign]
            return "a word is not what was written"

        self.engine.weights.verify = wrong  # type: ignore[method-assign]

    async def corrupt(self) -> None:
        """Flip a byte in every page of the pool that is owned."""
        memory = self.engine.memory
        assert memory.owned is not None
        size = memory.geometry.block_bytes
        for block in range(memory.geometry.block_count):
            at = memory.owned.pages_address + block * size
            memory.device.write(at, bytes([memory.device.read(at, 1)[0] ^ 1]))


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
            error = [type(failed).__name__, str(failed)]
        say(number, result, error)

    while line := await reader.readline():
        task = asyncio.create_task(carry_out(*json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    os.dup2(2, 1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as workers do
        runner.run(obey(json.loads(sys.argv[1])))
