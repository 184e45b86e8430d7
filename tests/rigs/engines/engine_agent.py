"""An engine of the tests, from inside: `python engine_agent.py '{"kind": …}'`.

It takes orders (`tests.rigs.agents`). What its engine says of streams goes out as news, [stream, tokens, finish],
written before the sink returns.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[3]))

from holdfast.core.requests import Output
from holdfast.kv.index import FULL
from holdfast.kv.pool import Pool
from holdfast.memory.client.weights import MappedWeights
from holdfast.spec.engines import FailoverSettings
from tests.rigs.agents import NEWS, obey, say
from tests.rigs.engines.any_engine import Said, make_engine, request

OUT = os.dup(1)  # not inherited by ranks: the pipe ends with this process


class EngineAgent(Said):
    """What an engine child can do; one method per order."""

    def __init__(self, launch: dict[str, Any]) -> None:
        super().__init__()
        (socket, device), *more = launch["vaults"]
        failover = FailoverSettings(socket, device, more_vaults=tuple(map(tuple, more)), **launch["failover"])
        self.kind = launch["kind"]
        self.engine = make_engine(self.kind, launch["settings"], failover)
        self.engine.ranks.dies_with_parent = launch["ranks_die"]
        self.willing = not launch["slow"]

    def outputs(self, outputs: list[Output]) -> bool:
        for output in outputs:
            say(NEWS, output.stream, output.tokens, output.finish, out=OUT)
        return self.willing

    def closed(self, streams: list[int]) -> None:
        say(NEWS, 0, streams, "closed", out=OUT)

    def fatal(self, why: str) -> None:
        super().fatal(why)
        if self.kind in ("torch", "vllm"):  # as a worker does: what its ranks still do must not go on
            os._exit(1)

    # -- orders

    async def load(self) -> str:
        await self.engine.load(self)
        return repr(self.engine.memory)

    async def wake(self, epoch: int, fds: list[int] | None = None) -> dict[str, Any]:
        woken = await self.engine.wake(epoch, tuple(fds or ()))
        return {"blocks": woken.blocks, "reason": woken.reason}

    async def become_standby(self) -> None:
        await self.engine.become_standby()

    async def check(self) -> str:
        return await self.engine.check()

    async def prove(self) -> None:
        self.engine.prove()

    async def vouch(self) -> None:
        """The next adopter may believe this one's pool, as if it had proven itself long enough."""
        self.engine.on_proved()

    async def submit(self, stream: int, tokens: list[int], max_tokens: int, given: dict[str, Any]) -> None:
        self.engine.submit(stream, request(tokens, max_tokens, **given))

    async def verify(self) -> str:
        return await self.engine.verify()

    async def renew(self) -> None:
        """As a worker does whose weights were found damaged: what they made is not believed."""
        await self.engine.become_standby(believed=False)
        await self.engine.renew()

    async def mapped(self) -> dict[str, int]:
        """Bytes of memory that outlives this process in its address space, and what it has in memory at all."""
        return memory_now()

    async def flip(self, seed: int) -> list[str]:
        """Bits of the weights that it reads: which."""
        from holdfast.engines.host.flips import WeightFaults
        from holdfast.engines.sim.faults import Fault

        faults = WeightFaults(self.engine.memory)
        faults.inject(Fault("flip_bits", seed))
        return list(faults.faults.flipped)

    async def fault(self, **command: Any) -> None:
        from holdfast.engines.sim.faults import parse_fault

        self.engine.hosted.inject(parse_fault(command))

    async def open_lock(self, path: str) -> int:
        """A file whose flock this process holds."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    async def facts(self) -> dict[str, Any]:
        engine, memory = self.engine, self.engine.memory
        pool = self._pool if memory.owned is not None else None
        return {
            "recomputed": engine.resumes.recomputed_tokens_max,
            "recomputed_total": engine.resumes.recomputed_tokens_total,
            "resumed": engine.resumes.resumed_total,
            "found": engine.progress().kv.prefix_hit_tokens,
            "gpu_fence": engine.gpu_fence.is_set(),
            "quarantined": pool.quarantined_count if pool else 0,
            "last_epoch": engine.last_epoch,
            "proven": engine.proven,
            "told": self.told,
            "ranks": engine.ranks.pids,
            "asleep": memory.asleep,
            "weights_ready": memory.weights_ready.is_set(),
            "load": engine.progress().load,
            "connected": memory.client.connected,
            "address": memory.client.mapped.address if memory.client.mapped else 0,
            "follower": repr(memory._follower),
            "geometry": memory.geometry.text.decode(),
        }

    async def hang_up(self) -> None:
        """Make no more steps and close the connection to the vault, but live on: what was queued may still land."""
        await self.fault(fault="wedge")
        await self.engine.memory.close()

    # -- damage

    async def damage(self) -> None:
        """Its next look at the weights finds them damaged. Committed slabs are sealed: nothing can damage them here."""
        weights = self.engine.hosted.weights
        verify = weights.verify

        def wrong(mapped: MappedWeights) -> str:
            weights.verify = verify
            return "a word is not what was written"

        weights.verify = wrong

    @property
    def _pool(self) -> Pool:
        return self.engine.memory.owned.pool

    async def damage_pages(self) -> int:
        """Make every FULL block's first numbers others; says how many blocks those were. Token ids stay such. Where
        vLLM has a block's parts is its own affair: there all numbers become others."""
        memory, index = self.engine.memory, self._pool.index
        blocks = [block for block in range(index.geometry.block_count) if index.state(block) == FULL]
        size, harmed = memory.geometry.block_bytes, blocks
        harm = bytes([1, 0, 0, 0] * (size // 8)) if self.kind in ("sim", "example") else bytes([0x55] * (size // 2))
        if self.kind == "vllm":
            harm, harmed = harm * 2, range(self.engine.hosted.home.size // size)
        for block in harmed:
            at = memory.owned.pages_address + block * size
            changed = int.from_bytes(memory.device.read(at, len(harm)), "little") ^ int.from_bytes(harm, "little")
            memory.device.write(at, changed.to_bytes(len(harm), "little"))
        return len(blocks)


def memory_now() -> dict[str, int]:
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "/memfd:holdfast " in line]
    with open("/proc/self/smaps_rollup") as sums:
        (resident,) = (int(line.split()[1]) * 1024 for line in sums if line.startswith("Rss:"))
    return {"mapped": sum(int(end, 16) - int(start, 16) for start, end in ranges), "resident": resident}


async def main(launch: dict[str, Any]) -> None:
    await obey(EngineAgent(launch), OUT)


if __name__ == "__main__":
    os.dup2(2, 1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as workers do
        runner.run(main(json.loads(sys.argv[1])))
