"""vLLM's block pool, implemented over the KV pool with an index that outlives the engine.

vLLM's block 0 is its null block. Blocks 1 to S are the shared ones, the index's 0 to S - 1. Behind them lie the private
blocks of all engine slots, of which a few are this engine's.

A step is planned by one `schedule()` and retired by one `update_from_output()`, in the same order. Between the two the
device may write the step's blocks. vLLM names a block's content when it plans the step that completes it, and gives
blocks back while such steps still run. So there are two kinds of blocks that the pool does not know:
- *named* blocks have a key, but not yet their content;
- *lingering* blocks are held by no request, but a step may still write them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.kv.index import Misuse
from holdfast.kv.pool import KvUse, NoRoom, Pool


class Block(Protocol):
    """One of vLLM's blocks, with its count of holders; null blocks are never given back."""

    ref_cnt: int

    @property
    def block_id(self) -> int: ...

    @property
    def is_null(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Name:
    """The content that a block will have when a step has retired."""

    block: int
    key: bytes
    depth: int
    step: int


class VaultBlocks:
    """The blocks of one vLLM engine. Always true:

    - A block is open in the index from before a step that may write it is planned until the last such step has retired.
    - A block becomes whole in the index, under the key of its content, when the step that wrote its last position
      retires, before that step's outputs leave.
    - A named block loses its name if it is handed out again, or if the same `schedule()` that named it gives it back:
      then its step will not write it.
    - A lingering block counts as free. Handed out again it stays open, in the same generation, since a device works in
      order. Otherwise it is released when all steps planned before it was given back have retired.
    - The pool holds a shared block once for us while vLLM counts holders of it, and while it lingers.
    - `room` is at most what `take` can give; it includes the blocks without holders that `touch` may take.
    - Without a pool, only this engine's private blocks are handed out, and their content is in no index.

    Every caller that changes blocks holds `books`, and so does other code that changes the pool. Nothing of the pool is
    cached here, so its changes (blocks freed from quarantine, streams no longer awaited) are seen at once.
    """

    def __init__(self, blocks: Sequence[Block], *, shared: int, private: range, text_blocks_max: int) -> None:
        if not 0 < shared < private.start <= private.stop <= len(blocks):
            raise ValueError(f"{len(blocks)} blocks are not {shared} shared ones with {private} behind them, private")
        self.books = threading.RLock()
        self.preempting = False  # a request that now gives blocks back is preempted: a next owner would await it
        self._blocks = blocks
        self._shared = shared
        self._text_blocks_max = text_blocks_max  # of one text
        self._private_count = len(private)
        self._private = list(reversed(private))  # free ones, taken from the end
        self._pool: Pool | None = None
        self._generations = [0] * (shared + 1)  # of open blocks that a step may yet write; else 0
        self._planned = self._retired = 0  # steps so far
        self._planning = False
        self._names: dict[int, Name] = {}
        self._by_key: dict[bytes, int] = {}  # the first block named so
        self._due: dict[int, list[Name]] = {}  # by step
        self._lingering: OrderedDict[int, int] = OrderedDict()  # unnamed, until this step has retired
        self._lingering_named: OrderedDict[int, bool] = OrderedDict()  # until published; the value as `preempting` was
        self._asked_tokens = self._found_tokens = 0

    def __repr__(self) -> str:
        lingering = len(self._lingering) + len(self._lingering_named)
        steps = f"{self._planned - self._retired} steps in flight"
        return f"<vLLM's blocks: {steps}, {len(self._names)} named, {lingering} lingering, {self._pool!r}>"

    # -- which blocks are private

    def attach(self, pool: Pool) -> None:
        """Use the pool's blocks from now on. Private blocks in use become private again when they are given back."""
        count = pool.index.geometry.block_count
        if self._pool is not None or count != self._shared:
            raise Misuse(f"a pool of {count} blocks for {self._shared} shared ones; now {self._pool!r}")
        self._pool = pool

    def detach(self) -> None:
        """Stop using the pool; leave its index unchanged. No shared block may be held, no step in flight."""
        if self._planned != self._retired or self._held():
            raise Misuse(f"still in use: {self!r}")
        self._pool = None

    # -- steps

    def planning(self) -> None:
        """Note that a `schedule()` begins."""
        self._planned += 1
        self._planning = True

    def planned(self) -> None:
        """Note that a `schedule()` ends."""
        self._planning = False

    def retired(self) -> None:
        """Note that the oldest step in flight has retired: vLLM has its outputs, no client has them yet. Publish the
        blocks that it named, each after its parent."""
        self._retired += 1
        names = self._due.pop(self._retired, ())
        if names and self._pool is not None:
            given_back: dict[bool, list[int]] = {}
            for name in names:
                if self._names.get(name.block) is name:
                    self._publish(self._pool, name, given_back)
            for live, blocks in given_back.items():
                self._pool.release(blocks, live=live)
        while self._lingering and next(iter(self._lingering.values())) <= self._retired:
            self._release(self._lingering.popitem(last=False)[0])

    # -- what vLLM's pool is asked

    @property
    def room(self) -> int:
        """Return how many blocks `take` would give. While the GPU fence is about to free blocks, leave out those of
        awaited streams. Blocks that a request finds are no longer awaited, so hits count as in vLLM. Counting awaited
        blocks takes milliseconds after a takeover (60,000 blocks: 40 ms), so skip it if any text fits without them."""
        pool = self._pool
        if pool is None:
            return len(self._private)
        room = pool.free_count + len(self._lingering) + len(self._lingering_named)
        if pool.fence_awaited and room >= self._text_blocks_max:
            return room
        return room + self._evictable(pool)

    def take(self, count: int) -> list[Block]:
        """Return `count` blocks, each with one holder: lingering blocks without a name first, those with one last."""
        if count > self.room:
            raise ValueError(f"Cannot get {count} free blocks from the pool")
        pool = self._pool
        if pool is None:
            taken = [self._private.pop() for _ in range(count)]
        else:
            taken = [self._lingering.popitem()[0] for _ in range(min(count, len(self._lingering)))]
            left, free = count - len(taken), pool.free_count
            fresh = left if left <= free else min(left, free + self._evictable(pool))
            opened = pool.allocate(fresh, sparing=pool.fence_awaited)
            assert not isinstance(opened, NoRoom), f"there was room: {opened}"
            for number, generation in opened:
                self._generations[number + 1] = generation
                taken.append(number + 1)
            while len(taken) < count:
                taken.append(self._lingering_named.popitem(last=False)[0])
                self._unname(taken[-1])
        blocks = [self._blocks[number] for number in taken]
        for block in blocks:
            assert not block.ref_cnt, f"{block} is held"
            block.ref_cnt = 1
        return blocks

    def name(self, block: Block, key: bytes, depth: int, *, earlier: bool) -> None:
        """Note that the block will have the content of `key`. Called while a step is planned, which completes it
        (`earlier`: an earlier step does), or while a step retires, which completed it."""
        number = block.block_id
        if block.is_null or number > self._shared:
            return  # no request will look for it
        assert self._generations[number], f"block {number} is whole, or not in use"
        last = self._planned - 1 if earlier and self._planned - 1 > self._retired else self._planned
        step = last if self._planning else self._retired + 1
        name = self._names[number] = Name(number, key, depth, step)
        self._by_key.setdefault(key, number)
        self._due.setdefault(step, []).append(name)

    def find(self, key: bytes) -> Block | None:
        """Return the block that has this content, or will have it after the steps planned so far."""
        if self._pool is None:
            return None
        block = self._pool.find(key)
        number = self._by_key.get(key) if block is None else block + 1
        return None if number is None else self._blocks[number]

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a holder to each of these blocks, which `find` just returned."""
        for block in blocks:
            if not block.ref_cnt and not block.is_null:
                number = block.block_id
                if number in self._lingering_named:
                    del self._lingering_named[number]
                else:
                    assert self._pool is not None, "nothing is found without a pool"
                    self._pool.hold(number - 1)
            block.ref_cnt += 1

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Drop a holder of each block, a stream's last block first."""
        whole = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt or block.is_null:
                continue
            number = block.block_id
            if number > self._shared:
                self._private.append(number)
            elif self._generations[number]:
                self._linger(number)
            else:
                whole.append(number - 1)
        if whole:
            assert self._pool is not None, "shared blocks are the pool's"
            self._pool.release(whole[::-1], live=self.preempting)

    def reset(self) -> bool:
        """Forget all computed blocks; return False, and change nothing, if a request holds some."""
        if self._held() or len(self._private) < self._private_count:
            return False
        for number in list(self._lingering_named):
            self._unname(number)
            self._lingering[number] = self._planned
        self._lingering_named.clear()
        if self._pool is not None:
            self._pool.evict(self._pool.cached_count)
        return True

    # -- what others ask

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a text would be found, without holding them."""
        pool = self._pool
        for count, key in enumerate(keys):
            if pool is None or not (key in self._by_key or pool.match((key,))):
                return count
        return len(keys)

    def started(self, asked_tokens: int, found_tokens: int) -> None:
        """Count a stream that begins to run, having looked for so many leading positions."""
        self._asked_tokens += asked_tokens
        self._found_tokens += found_tokens

    def use(self) -> KvUse:
        """Return how full the pool is, or without a pool, our private blocks. Callable from any thread."""
        pool = self._pool
        if pool is None:
            return KvUse(self._private_count, self._private_count - len(self._private))
        return KvUse(self._shared, self._held(), pool.cached_count, self._asked_tokens, self._found_tokens)

    # -- inside

    def _held(self) -> int:
        """Return the number of shared blocks that streams hold."""
        pool = self._pool
        if pool is None:
            return 0
        unheld = pool.free_count + pool.cached_count + pool.quarantined_count
        return self._shared - unheld - len(self._lingering) - len(self._lingering_named)

    def _evictable(self, pool: Pool) -> int:
        return pool.cached_count - (pool.awaited_count if pool.fence_awaited else 0)

    def _publish(self, pool: Pool, name: Name, given_back: dict[bool, list[int]]) -> None:
        """Publish a block that no step writes any more. If another block with the same content is held, this one stays
        open."""
        number, generation = name.block, self._generations[name.block]
        self._unname(number)
        self._generations[number] = 0
        pool.publish(number - 1, generation, name.key, name.depth)
        live = self._lingering_named.pop(number, None)
        if live is not None:
            given_back.setdefault(live, []).append(number - 1)

    def _linger(self, number: int) -> None:
        name = self._names.get(number)
        if name is not None and self._planning and name.step == self._planned:
            self._unname(number)
            name = None
        if name is not None:
            self._lingering_named[number] = self.preempting
        elif self._planned > self._retired:
            self._lingering[number] = self._planned
        else:
            self._release(number)

    def _release(self, number: int) -> None:
        assert self._pool is not None, "shared blocks are the pool's"
        self._generations[number] = 0
        self._pool.release((number - 1,))

    def _unname(self, number: int) -> None:
        key = self._names.pop(number).key
        if self._by_key.get(key) == number:
            del self._by_key[key]
