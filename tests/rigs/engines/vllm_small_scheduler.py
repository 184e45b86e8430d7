"""A scheduler as small as can be that asks for blocks as vLLM's does, drives steps and tells the witness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from holdfast.engines.vllm.blocks import Block, VaultBlocks
from tests.rigs.engines.vllm_blocks import Flight, World, next_token

PRIVATE = 2


@dataclass(slots=True)
class FakeBlock:
    """Has the fields of vLLM's."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


@dataclass(eq=False)
class Stream:
    """`tokens` are those the scheduler knows; it may have planned one more, whose token a step in flight draws."""

    tokens: list[int]
    end: int
    reads_cache: bool = True
    computed: int = 0
    placeholders: int = 0
    stale: int = 0  # steps in flight from before it was preempted
    named: int = 0
    blocks: list[Block] = field(default_factory=list)

    def text(self, length: int) -> list[int]:
        text = list(self.tokens)
        while len(text) < length:
            text.append(next_token(text))
        return text


def keys_of(text: Sequence[int], size: int) -> list[bytes]:
    """Return a chain of keys."""
    keys, parent = [], b""
    for start in range(0, len(text) - size + 1, size):
        parent = blake2b(parent + bytes(text[start : start + size]), digest_size=16).digest()
        keys.append(parent)
    return keys


class Desk:
    """`ahead`: plans a step before it knows what the one in flight draws, as vLLM does asynchronously. `fifo`: the last
    request is preempted first; else the first one, even if this very step was to compute for it."""

    def __init__(
        self, shared: int, size: int, depth: int, *, ahead: bool, fifo: bool, text_blocks_max: int | None = None
    ) -> None:
        self.world = World(shared, size)
        self.text_blocks_max = text_blocks_max or shared
        self.size, self.depth, self.ahead, self.fifo = size, depth, ahead, fifo
        self.named: dict[int, tuple[bytes, int]] = {}  # block → what it shall contain, and after which step
        self.planned = self.retired = 0
        self.running: list[Stream] = []
        self.waiting: list[Stream] = []
        self.wake()

    def wake(self) -> None:
        """A new engine over the pool as it is."""
        shared = self.world.shared
        blocks = [FakeBlock(block) for block in range(1 + shared + PRIVATE)]
        blocks[0].is_null = True
        private = range(shared + 1, shared + 1 + PRIVATE)
        self.vault = VaultBlocks(blocks, shared=shared, private=private, text_blocks_max=self.text_blocks_max)
        self.vault.attach(self.world.pool)
        self.named.clear()
        self.planned = self.retired = 0

    # -- steps

    def schedule(self, budget: int) -> None:
        self.vault.planning()
        self.planned += 1
        flight, takes = Flight(), dict[Stream, int]()
        preempted = False
        for stream in list(self.running):
            if stream not in self.running:
                continue
            end = min(stream.end, len(stream.tokens) + stream.placeholders)
            count = min(budget, end - stream.computed)
            if count <= 0:
                continue
            missing = self._missing(stream, stream.computed + count)
            while missing > self.vault.room and stream in self.running:
                self._preempt(self.running[-1 if self.fifo else 0], takes)
                preempted = True
            if stream in self.running:
                self._grow(stream, count, missing)
                takes[stream] = count
                budget -= count
        while self.waiting and budget and not preempted:
            count = self._start(self.waiting[0], budget)
            if not count:
                break
            takes[self.waiting[0]] = count
            self.running.append(self.waiting.pop(0))
            budget -= count
        for stream, count in takes.items():
            numbers = [block.block_id for block in stream.blocks]
            flight.plan(stream.text(stream.computed + count), stream.computed, count, numbers, self.size)
            stream.computed += count
            draws = stream.computed >= len(stream.tokens) + stream.placeholders
            flight.members.append((stream, count, draws))
            stream.placeholders += draws and self.ahead
        self.vault.planned()
        self.world.flights.append(flight)

    def retire(self) -> None:
        flight = self.world.land()
        for stream, _, draws in flight.members:
            assert isinstance(stream, Stream)
            stale = stream.stale > 0
            stream.stale -= stale
            if not draws or stream not in self.running + self.waiting:
                continue
            stream.tokens.append(next_token(stream.tokens))
            if self.ahead and not stale:
                stream.placeholders -= 1
                self._name(stream, stream.computed - stream.placeholders, self.retired + 1)
            if len(stream.tokens) >= stream.end:
                self.abort(stream)
        self.vault.retired()
        self.retired += 1
        self._check_punctual()

    def abort(self, stream: Stream) -> None:
        (self.running if stream in self.running else self.waiting).remove(stream)
        self._give_back(stream)
        stream.stale = 0

    # -- blocks, as vLLM asks for them

    def _missing(self, stream: Stream, length: int) -> int:
        return -(-length // self.size) - len(stream.blocks)

    def _start(self, stream: Stream, budget: int) -> int:
        keys = keys_of(stream.tokens, self.size) if stream.reads_cache else []
        self.world.learn(stream.tokens, keys)
        found: list[Block] = []
        for key in keys[: (len(stream.tokens) - 1) // self.size]:
            block = self.vault.find(key)
            if block is None:
                break
            found.append(block)
        assert self.vault.match(keys[: len(found)]) == len(found)
        known = len(found) * self.size
        count = min(budget, len(stream.tokens) - known)
        fresh = -(-(known + count) // self.size) - len(found)
        if fresh + sum(not block.ref_cnt for block in found) > self.vault.room:
            return 0
        self.vault.touch(found)
        stream.blocks, stream.named = found, len(found)
        self._grow(stream, known + count, fresh, computed=0)
        stream.computed = known
        return count

    def _grow(self, stream: Stream, count: int, missing: int, *, computed: int | None = None) -> None:
        computed = stream.computed if computed is None else computed
        fresh = self.vault.take(max(0, missing))
        for block in fresh:
            self.named.pop(block.block_id, None)
        stream.blocks = stream.blocks + fresh
        self._name(stream, min(computed + count, len(stream.tokens)), self.planned, computed)

    def _name(self, stream: Stream, length: int, step: int, computed: int = 0) -> None:
        keys = keys_of(stream.tokens, self.size)
        self.world.learn(stream.tokens, keys)
        for depth in range(stream.named, length // self.size):
            earlier = (depth + 1) * self.size <= computed
            self.vault.name(stream.blocks[depth], keys[depth], depth, earlier=earlier)
            self.named[stream.blocks[depth].block_id] = keys[depth], step - earlier
        stream.named = max(stream.named, length // self.size)

    def _preempt(self, stream: Stream, takes: dict[Stream, int]) -> None:
        self.running.remove(stream)
        if takes.pop(stream, None) is not None:  # this step will not write what it was to complete
            for block in stream.blocks:
                if self.named.get(block.block_id, (b"", 0))[1] == self.planned:
                    del self.named[block.block_id]
        self.vault.preempting = True
        self._give_back(stream)
        self.vault.preempting = False
        stream.stale = sum(stream is member for flight in self.world.flights for member, _, _ in flight.members)
        self.waiting.insert(0, stream)

    def _give_back(self, stream: Stream) -> None:
        blocks = stream.blocks
        stream.blocks, stream.computed, stream.placeholders, stream.named = [], 0, 0, 0
        self.vault.give_back(reversed(blocks))

    # -- what must hold

    def _check_punctual(self) -> None:
        """What the steps retired by now have completed is published: 0 late."""
        for block, (key, step) in list(self.named.items()):
            if step <= self.retired:
                assert self.world.pool.match((key,)), f"block {block} was complete with step {step}"
                del self.named[block]
        written = {block for flight in self.world.flights for block in flight.blocks}
        for stream in self.running:
            in_flight = sum(count for f in self.world.flights for member, count, _ in f.members if member is stream)
            keys = keys_of(stream.tokens, self.size)[: (stream.computed - in_flight) // self.size]
            for key, block in zip(keys, stream.blocks, strict=False):
                assert block.block_id in written or self.world.pool.match((key,)), f"{block} is late"

    def check(self) -> None:
        held = [block for stream in self.running + self.waiting for block in stream.blocks]
        for block in {block.block_id: block for block in held}.values():
            assert block.ref_cnt == sum(block is other for other in held)
        self.world.check(self.vault, {block.block_id for block in held})
        self.world.check_adoption()
