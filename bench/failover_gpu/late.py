"""Late writes, planted: an owner queues long work over its open blocks and is killed; its heir is watched.

What must hold: no word of a whole block is ever wrong, before or after the GPU fence; a quarantined block is not handed
out before it; what the heir writes is not overwritten. That late writes really land is measured too: an open block's
words tell the number of the queued work that wrote them last.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import numpy as np

from bench.failover_gpu.engine import FENCE_S, Settings, say
from bench.failover_gpu.pool import VaultEngine, geometry_of
from holdfast.kv.adopt import QUARANTINED
from holdfast.kv.pool import NoRoom
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.spec.names import is_host
from tests.rigs.gpu.lane import THIN, HostLane, Piece, open_lane

# A stream of the driver holds about a thousand launches; one more waits for room, and then we would not be ahead.
OPS_MAX = 900
COPY_EVERY = 4  # each so many-th piece of work is a copy, the others are kernels
CALIBRATE_OPS = 4
HEIR_BLOCKS_MAX = 64  # blocks the heir writes of its own before the GPU fence
LATER_S = 0.3  # longer than any late write was ever seen after EOF: what would still land has landed
QUEUE_STEP_S = 0.005
START_S = 20.0


class LateEngine(VaultEngine):
    """Plants late writes when told to, and watches those of the owner it follows."""

    _open: list[int]
    _copies: int = 0  # address of the heir's private copies of the blocks that were open

    async def start(self) -> None:
        await super().start()
        self._copies = self.lane.scratch(self.settings.block_bytes * self.settings.open_count)

    # -- the victim

    async def serve(self) -> None:
        assert self.kv is not None
        wanted = self.settings.open_count + HEIR_BLOCKS_MAX
        self.kv.evict(max(0, wanted - self.kv.free_count))
        self._open = [block for block, _ in self.open_blocks(self.settings.open_count)]

    async def plant(self) -> dict[str, Any]:
        if is_host(self.settings.device):
            return await self._plant_elsewhere()
        self._queue(CALIBRATE_OPS)
        self.lane.synchronize()
        began_s = time.monotonic()
        self._queue(CALIBRATE_OPS)
        self.lane.synchronize()
        op_ms = (time.monotonic() - began_s) * 1000 / CALIBRATE_OPS
        count = max(1, min(OPS_MAX, round(self.settings.queue_ms / op_ms)))
        self._queue(count)
        return {"ops": count, "op_ms": round(op_ms, 3), "queued_ms": round(count * op_ms, 1)}

    def _queue(self, count: int) -> None:
        """Work number n writes the next open block; its words say n."""
        size = self.settings.block_bytes
        for number in range(count):
            block = self._open[number % len(self._open)]
            before = self._open[(number - 1) % len(self._open)]
            if number % COPY_EVERY == COPY_EVERY - 1:
                self.lane.copy(self.at(block), self.at(before), size)
            else:
                self.lane.fill(self.at(block), size, number, THIN)

    async def _plant_elsewhere(self) -> dict[str, Any]:
        """Without a GPU a process plays its queue, and outlives us as the device's work would."""
        asked = msgspec.structs.replace(self.settings, part="queue", epoch=self.epoch, blocks=tuple(self._open))
        words = (sys.executable, "-m", "bench.failover_gpu.chain", msgspec.json.encode(asked).decode())
        player = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        assert player.stdout is not None
        heard = await asyncio.wait_for(player.stdout.readline(), START_S)
        assert b"queued" in heard, f"the queue's process said {heard!r}"
        return {"ops": 0, "op_ms": QUEUE_STEP_S * 1000, "queued_ms": self.settings.queue_ms}

    # -- the heir

    async def wake(self, *, fenced: bool) -> dict[str, Any]:
        if not (facts := await self.take_over()):
            return facts
        assert self.adoption is not None
        assert self.kv is not None
        quarantined = self.adoption.blocks_of(QUARANTINED)
        must_be = self.believed()
        wrong = {"at_cpu_fence": self.lane.count_wrong(must_be)}
        early, mine = self._write_own(set(quarantined))
        must_be += mine
        wrong["until_gpu_fence"], passes = await self._watch(must_be)
        wrong["at_gpu_fence"] = self.lane.count_wrong(must_be)
        late = self._late_writes(quarantined)
        given_back = self.kv.gpu_fence_passed()
        must_be += self._write_where_it_was_open(set(quarantined))
        await asyncio.sleep(LATER_S)
        wrong["later"] = self.lane.count_wrong(must_be)
        self.kv.canary_passed()
        facts |= {"wrong_words": sum(wrong.values()), "wrong": wrong, "passes": passes, "handed_out_early": early}
        return facts | late | {"quarantined": len(quarantined), "given_back": given_back}

    def adopted(self) -> None:
        """Copy what is quarantined, as soon as may be: what is different later was written late."""
        assert self.adoption is not None
        size, blocks = self.settings.block_bytes, self.adoption.blocks_of(QUARANTINED)
        assert len(blocks) <= self.settings.open_count, f"{len(blocks)} blocks are quarantined"
        for place, block in enumerate(blocks):
            self.lane.copy(self._copies + place * size, self.at(block), size)
        self.lane.synchronize()

    def _write_own(self, quarantined: set[int]) -> tuple[int, list[Piece]]:
        """Blocks of our own before the GPU fence; how many of all we could get are quarantined ones."""
        assert self.kv is not None
        all_there = self.open_blocks(self.kv.free_count)
        early = sum(block in quarantined for block, _ in all_there)
        more = self.kv.allocate(self.kv.cached_count + 1)  # not even in need
        if not isinstance(more, NoRoom) or more.quarantined != len(quarantined):
            early += 1
        mine, rest = all_there[:HEIR_BLOCKS_MAX], all_there[HEIR_BLOCKS_MAX:]
        self.kv.release([block for block, _ in rest])
        return early, self.fill_and_publish(mine)

    async def _watch(self, must_be: list[Piece]) -> tuple[int, int]:
        """Verify everything over and over until the GPU fence has passed."""
        wrong = passes = 0
        deadline_s = time.monotonic() + FENCE_S
        while not self.pool.gpu_fence.is_set():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no GPU fence within {FENCE_S} s")
            wrong += self.lane.count_wrong(must_be)
            passes += 1
            await asyncio.sleep(0.001)  # the fence's notice comes through this thread
        self.mark("gpu_fence")
        return wrong, passes

    def _late_writes(self, blocks: list[int]) -> dict[str, int]:
        """What changed in the blocks that were open since we copied them, which was after EOF."""
        size = self.settings.block_bytes
        changed_words, newest = 0, [-1, -1]
        for place, block in enumerate(blocks):
            found = [self.lane.words(self._copies + place * size, size), self.lane.words(self.at(block), size)]
            changed_words += int(np.count_nonzero(found[0] != found[1]))
            for when, words in enumerate(found):
                number = int(words[0])
                newest[when] = max(newest[when], number if number < OPS_MAX else -1)
        return {"late_words": changed_words, "late_ops": newest[1] - newest[0]}

    def _write_where_it_was_open(self, blocks: set[int]) -> list[Piece]:
        """Past the GPU fence they are free: fill them, and see later that nothing else did."""
        assert self.kv is not None
        all_there = self.open_blocks(self.kv.free_count)
        self.kv.release([block for block, _ in all_there if block not in blocks])
        again = [(block, generation) for block, generation in all_there if block in blocks]
        assert len(again) == len(blocks), "a quarantined block did not come back"
        return self.fill_and_publish(again)


async def play_queue(settings: Settings) -> None:
    """The queue of a device we do not have: it maps the pool under its owner's epoch and hangs up, so that it holds the
    GPU fence closed and not the CPU fence; it writes the owner's open blocks until its time is over."""
    device = open_device(settings.device)
    lane = open_lane(settings.device)
    assert isinstance(lane, HostLane)
    client = MemoryClient(settings.path, device, settings.engine_id)
    await client.connect()
    await client.register_mapping(settings.epoch)
    mapping = await PoolClient(client, device).map(writable=True)
    await client.close()
    size = geometry_of(settings).block_bytes
    say("queued")
    deadline_s = time.monotonic() + settings.queue_ms / 1000
    number = 0
    while time.monotonic() < deadline_s:
        block = settings.blocks[number % len(settings.blocks)]
        lane.fill(mapping.pages_address + block * size, size, number)
        number += 1
        await asyncio.sleep(QUEUE_STEP_S)  # a kernel takes a while
