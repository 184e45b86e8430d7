"""The owner's allocator over an index: which block is free, held, cached, awaited or quarantined.

What must always be true:
- a block is handed out only through `Index.open`, so what an adopter finds is never more than was complete;
- a block that holders share is never evicted; of the others those of no running stream go first, the longest unused
  first, and last those of streams that ran when the last owner died: else early resumes evict late ones;
- a quarantined block is not touched before the GPU fence of all earlier owners (facts 4b);
- private blocks lie behind the pool and have no entry: warm-up, canaries, capture and padding write there.

No I/O, no clock: "last use" is a count of the pool's own acts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.memory.kv.geometry import KEY_BYTES
from holdfast.memory.kv.index import FREE as ENTRY_FREE
from holdfast.memory.kv.index import LIVE, Index, Misuse, Owner

if TYPE_CHECKING:  # adopt.py loads numpy; an owner that starts fresh does without
    from holdfast.memory.kv.adopt import Adoption

# What a block is to the pool. The first four are `adopt`'s verdicts by the same number.
FREE, ADOPTED, _, QUARANTINED, OPEN, HELD, COOL = range(7)
# Ticks of one owner come after all ticks of owners before it: epochs are milliseconds, and 2**14 acts a millisecond are
# more than a Python process makes. 48 + 14 bits stay below the LIVE bit.
TICKS_PER_EPOCH_BITS = 14


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Not that many blocks now; `quarantined` ones come back at the GPU fence, held ones as streams end."""

    asked: int
    free: int
    evictable: int
    quarantined: int


class Pool:
    """Block ids of one device for its owner. One thread; every act takes a few microseconds."""

    def __init__(self, index: Index, epoch: int, *, private_count: int = 0, adoption: Adoption | None = None) -> None:
        count = index.geometry.block_count
        owner = index.owner
        if owner is None or owner.epoch != epoch:
            raise Misuse(f"epoch {epoch} does not own the index ({owner}); format or adopt it first")
        self.index = index
        self.epoch = epoch
        self._block_tokens = index.geometry.block_tokens
        self.private = range(count, count + private_count)
        self._private_free = list(reversed(self.private))
        self._adoption = adoption
        self._kinds = bytearray(adoption.verdicts if adoption else count)
        self._blocks = adoption.by_key if adoption else {}  # key → block
        self._keys: dict[int, bytes] = {}  # of adopted blocks only once they were held
        self._refs = [0] * count
        self._free = adoption.blocks_of(FREE) if adoption else list(range(count))  # taken from the end
        self._evictable = self._kinds.count(ADOPTED)
        self._cool: OrderedDict[int, None] = OrderedDict()  # released here, oldest first
        # Adopted blocks in their order of eviction, the next one last; those held since are passed over.
        self._cold: list[int] | None = None  # None: nobody asked yet
        self._awaited: list[int] = []
        self._twins: dict[int, int] = {}
        self._tick = epoch << TICKS_PER_EPOCH_BITS

    def __repr__(self) -> str:
        held = len(self._kinds) - self.free_count - self._evictable - self.quarantined_count
        return (
            f"<kv pool epoch {self.epoch}: {self.free_count} free, {held} held, {self._evictable} cached, "
            f"{self.quarantined_count} quarantined>"
        )

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Whole blocks nobody holds: found by their key, and evicted when room is needed."""
        return self._evictable

    @property
    def quarantined_count(self) -> int:
        return self._kinds.count(QUARANTINED)

    # -- a stream's blocks

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a sequence are here."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, each held once more until `release`."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            self._hold(block, key)
            found.append(block)
        return found

    def allocate(self, count: int = 1) -> list[tuple[int, int]] | NoRoom:
        """That many open blocks with their generations, held once; all or none. What is evicted is withdrawn by the
        very store that opens it."""
        if len(self._free) + self._evictable < count:
            return NoRoom(count, len(self._free), self._evictable, self.quarantined_count)
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict_one()
            generation = self.index.open(block)
            self._kinds[block] = OPEN
            self._refs[block] = 1
            taken.append((block, generation))
        return taken

    def publish(self, block: int, generation: int, key: bytes, depth: int) -> int:
        """Once the step that filled it has retired, before its tokens are shown. Gives the block that now answers for
        the key: another one, if that was published before. Then ours stays open (and its holder's), and the other is
        held with it: what the stream would need again after our death is not evicted under it."""
        other = self._blocks.get(key)
        if other is not None and other != block:
            if block not in self._twins:
                self._hold(other, key)
                self._twins[block] = other
            return other
        self._tick += 1
        self.index.publish(
            block, generation, key, epoch=self.epoch, depth=depth, tokens=self._block_tokens, heat=self._tick | LIVE
        )
        self._kinds[block] = HELD
        self._blocks[key] = block
        self._keys[block] = key
        return block

    def reopen(self, block: int) -> int:
        """A published block is to be written again by its only holder (a swap-in, a rewind): it is withdrawn first."""
        if self._kinds[block] != HELD or self._refs[block] != 1:
            raise Misuse(f"block {block} is not published and held exactly once")
        generation = self.index.open(block)
        self._kinds[block] = OPEN
        del self._blocks[self._keys.pop(block)]
        return generation

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each, in the stream's order. An open one becomes free: to be called only when its last
        possible writer has retired, for cancelled and preempted streams too."""
        for block in reversed(blocks):  # the deepest becomes the oldest: a child is no use without its parent
            refs = self._refs[block] - 1
            if refs < 0:
                raise Misuse(f"block {block} is held by nobody")
            self._refs[block] = refs
            if not refs:
                self._let_go(block)

    # -- the pool as a whole

    def evict(self, count: int) -> int:
        """Make up to `count` cached blocks free; says how many."""
        count = min(count, self._evictable)
        for _ in range(count):
            block = self._evict_one()
            self.index.free(block)
            self._kinds[block] = FREE
            self._free.append(block)
        return count

    def gpu_fence_passed(self) -> int:
        """All work of all earlier owners is over: quarantined blocks are free. Says how many those were."""
        blocks = []
        block = self._kinds.find(QUARANTINED)
        while block >= 0:
            blocks.append(block)
            block = self._kinds.find(QUARANTINED, block + 1)
        for block in blocks:
            if self.index.state(block) != ENTRY_FREE:
                self.index.free(block)
            self._kinds[block] = FREE
        self._free[:0] = blocks  # taken last
        return len(blocks)

    def streams_resumed(self) -> None:
        """No stream of the dead owner is awaited any more: what none of them took is cached like anything else."""
        cold, awaited = self._adopted_order()
        self._cold = awaited + cold
        self._awaited = []

    def canary_passed(self) -> None:
        """What was adopted makes right tokens: the next adopter may believe it again."""
        self.index.store_owner(Owner(self.epoch, 0))

    def allocate_private(self, count: int = 1) -> list[int] | NoRoom:
        if len(self._private_free) < count:
            return NoRoom(count, len(self._private_free), 0, 0)
        return [self._private_free.pop() for _ in range(count)]

    def release_private(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self.private or block in self._private_free:
                raise Misuse(f"block {block} is not a private block in use")
            self._private_free.append(block)

    # -- inside

    def _hold(self, block: int, key: bytes) -> None:
        refs = self._refs[block]
        self._refs[block] = refs + 1
        if refs:
            return
        if self._kinds[block] == COOL:
            del self._cool[block]
        self._evictable -= 1
        self._kinds[block] = HELD
        self._keys[block] = key
        self._tick += 1
        self.index.set_heat(block, self._tick | LIVE)

    def _let_go(self, block: int) -> None:
        if self._kinds[block] == OPEN:
            self.index.free(block)
            self._kinds[block] = FREE
            self._free.append(block)
            if block in self._twins:
                self.release((self._twins.pop(block),))
            return
        self._tick += 1
        self.index.set_heat(block, self._tick)
        self._kinds[block] = COOL
        self._cool[block] = None
        self._evictable += 1

    def _evict_one(self) -> int:
        """The next to go leaves the books; its entry changes with the store that follows."""
        cold, awaited = self._adopted_order()
        block = self._pop_adopted(cold)
        if block is None and self._cool:
            block, _ = self._cool.popitem(last=False)
        if block is None:
            block = self._pop_adopted(awaited)
        if block is None:
            raise Misuse("nothing is left to evict")
        self._evictable -= 1
        del self._blocks[self._keys.pop(block) if block in self._keys else self._adopted_key(block)]
        return block

    def _pop_adopted(self, order: list[int]) -> int | None:
        while order:
            block = order.pop()
            if self._kinds[block] == ADOPTED:
                return block
        return None

    def _adopted_key(self, block: int) -> bytes:
        """From our own copy: a key damaged in the index since must not leave a withdrawn block findable."""
        assert self._adoption is not None
        return self._adoption.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]

    def _adopted_order(self) -> tuple[list[int], list[int]]:
        """Sorted when room first runs short, not at adoption, where every millisecond is a stream's."""
        if self._cold is None:
            self._cold = []
            if self._adoption is not None:
                wanted = self._kinds.translate(bytes(kind == ADOPTED for kind in range(256)))
                cold, awaited = self._adoption.coldest_first(bytes(wanted))
                self._cold, self._awaited = cold[::-1], awaited[::-1]
        return self._cold, self._awaited
