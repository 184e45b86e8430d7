"""What vLLM's scheduler asks of its block pool, answered by the KV pool whose index outlives the engine.

vLLM's block 0 is its null block; 1 to S are the shared ones, the index's 0 to S - 1; behind them lie the private ones
of all engine slots, of which a few are this engine's. A step is planned by one `schedule()` and retired by one
`update_from_output()`, in the same order; between the two the device may write what the step was given. vLLM names a
block's content when it plans the step that completes it, and gives blocks back while such steps are still running. So
two kinds of blocks exist here that the pool knows nothing of: *named* ones, whose content has a key and is not yet
there, and *lingering* ones, which nobody holds and somebody may still write.
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
    """vLLM's, with its own count of who holds it; null ones are never given back."""

    ref_cnt: int

    @property
    def block_id(self) -> int: ...

    @property
    def is_null(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Name:
    """What a block will contain once a step has retired."""

    block: int
    key: bytes
    depth: int
    step: int


class VaultBlocks:
    """What must always be true:

    - a block is open in the index before a step is planned that may write it, and until the last such step has retired;
    - a block is whole in the index from the retirement of the step that wrote its last position, under the key of what
      is in it, before that step's outputs leave; a named block that was handed out anew, or given back by the very
      `schedule()` that named it (its step will not write it), loses its name;
    - a lingering block is room like any other: handed out again it stays open, in the same generation, since work on a
      device is done in order; otherwise it is released when all steps planned before it was given back have retired;
    - the pool holds a shared block once for us while vLLM counts holders of it, and while it lingers; `room` is no more
      than what `take` gives, and a block that `touch` takes without holders was one of it;
    - without a pool, only this engine's private blocks are handed out, and no index hears of what is in them.

    `books` is held by whoever calls anything here that changes something, and by whoever changes the pool behind our
    back. Nothing of the pool's is remembered here, so what that may be (blocks back from quarantine, streams awaited
    no more) is seen by the next question.
    """

    def __init__(self, blocks: Sequence[Block], *, shared: int, private: range, text_blocks_max: int) -> None:
        if not 0 < shared < private.start <= private.stop <= len(blocks):
            raise ValueError(f"{len(blocks)} blocks are not {shared} shared ones with {private} behind them, private")
        self.books = threading.RLock()
        self.preempting = False  # whoever gives blocks back now only waits for room: awaited, after our death
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

    # -- whose blocks

    def attach(self, pool: Pool) -> None:
        """From now on blocks are the pool's. Private ones still held are private ones once more when given back."""
        count = pool.index.geometry.block_count
        if self._pool is not None or count != self._shared:
            raise Misuse(f"a pool of {count} blocks for {self._shared} shared ones; now {self._pool!r}")
        self._pool = pool

    def detach(self) -> None:
        """To be called when no shared block is held and no step in flight: the index is left as it stands."""
        if self._planned != self._retired or self._held():
            raise Misuse(f"still in use: {self!r}")
        self._pool = None

    # -- steps

    def planning(self) -> None:
        """A `schedule()` begins."""
        self._planned += 1
        self._planning = True

    def planned(self) -> None:
        """It ends."""
        self._planning = False

    def retired(self) -> None:
        """The oldest step in flight has retired and vLLM has seen its outputs, which nobody else has. What is named by
        it is published, each after its parent."""
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
        """Blocks that `take` would give. While the fence is about to bring some back, not those of streams that are
        awaited: what anybody finds is not awaited any more, so hits count as vLLM counts them. To count these takes
        milliseconds right after a takeover (60,000 blocks: 40), so not where any text fits without."""
        pool = self._pool
        if pool is None:
            return len(self._private)
        room = pool.free_count + len(self._lingering) + len(self._lingering_named)
        if pool.fence_awaited and room >= self._text_blocks_max:
            return room
        return room + self._evictable(pool)

    def take(self, count: int) -> list[Block]:
        """That many blocks, each held once: first those that linger without a name, last those with one."""
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
        """The block's content will be what `key` says. While a step is planned: by that step, or `earlier` if all of it
        was planned before. While one retires: by that one."""
        number = block.block_id
        if block.is_null or number > self._shared:
            return  # nobody will look for it
        assert self._generations[number], f"block {number} is whole, or nobody's"
        last = self._planned - 1 if earlier and self._planned - 1 > self._retired else self._planned
        step = last if self._planning else self._retired + 1
        name = self._names[number] = Name(number, key, depth, step)
        self._by_key.setdefault(key, number)
        self._due.setdefault(step, []).append(name)

    def find(self, key: bytes) -> Block | None:
        """The block that has this content, or will when the steps planned by now have run."""
        if self._pool is None:
            return None
        block = self._pool.find(key)
        number = self._by_key.get(key) if block is None else block + 1
        return None if number is None else self._blocks[number]

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more holder for each; they were found just now."""
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
        """One holder fewer for each, a stream's last block first."""
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
        """Nothing computed so far is found any more. False: some of it is held, and nothing has changed."""
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
        """How many leading blocks of a text would be found. Only looks."""
        pool = self._pool
        for count, key in enumerate(keys):
            if pool is None or not (key in self._by_key or pool.match((key,))):
                return count
        return len(keys)

    def started(self, asked_tokens: int, found_tokens: int) -> None:
        """A stream begins to run, having looked for so many leading positions."""
        self._asked_tokens += asked_tokens
        self._found_tokens += found_tokens

    def use(self) -> KvUse:
        """How full the pool is; without one, how full our private blocks are. Another thread may ask."""
        pool = self._pool
        if pool is None:
            return KvUse(self._private_count, self._private_count - len(self._private))
        return KvUse(self._shared, self._held(), pool.cached_count, self._asked_tokens, self._found_tokens)

    # -- inside

    def _held(self) -> int:
        """Shared blocks in streams' hands."""
        pool = self._pool
        if pool is None:
            return 0
        unheld = pool.free_count + pool.cached_count + pool.quarantined_count
        return self._shared - unheld - len(self._lingering) - len(self._lingering_named)

    def _evictable(self, pool: Pool) -> int:
        return pool.cached_count - (pool.awaited_count if pool.fence_awaited else 0)

    def _publish(self, pool: Pool, name: Name, given_back: dict[bool, list[int]]) -> None:
        """Its writers have all retired. If another block has the same content and is held, this one stays open."""
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
