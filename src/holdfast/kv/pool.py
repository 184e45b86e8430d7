"""The owner's allocator over an index: which block is free, held, cached, awaited or quarantined.

What must always be true:
- a block is handed out only through `Index.open`, so what an adopter finds is never more than was complete;
- a block that somebody holds is never evicted; of the others those that streams of the last owner will look for when
  they come back, the *awaited* ones, go last (`cached`): else early resumes evict late ones;
- who asks *sparing* gets none of these: worth it while quarantined blocks are about to come back;
- a quarantined block is not touched before the GPU fence of all earlier owners (facts 4b).

No I/O, no clock: "last use" is a count of the pool's own acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.kv.cached import Cached
from holdfast.kv.geometry import KEY_BYTES
from holdfast.kv.index import ADOPTIONS_WITHOUT_CANARY_MAX, LIVE, Index, Misuse, Owner
from holdfast.kv.index import FREE as ENTRY_FREE

if TYPE_CHECKING:  # adopt.py loads numpy; an owner that starts fresh does without
    from holdfast.kv.adopt import Adoption

# What a block is to the pool. The first four are `adopt`'s verdicts by the same number.
FREE, CACHED, _, QUARANTINED, OPEN, HELD = range(6)
# Ticks of one owner come after all ticks of owners before it: epochs are milliseconds, and 2**14 acts a millisecond are
# more than a Python process makes. 48 + 14 bits stay below the LIVE bit.
TICKS_PER_EPOCH_BITS = 14


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Not that many blocks now; `quarantined` ones come back at the GPU fence, held ones as streams end, and `spared`
    ones are not for who asked sparing."""

    asked: int
    free: int
    quarantined: int
    spared: int = 0


@dataclass(frozen=True, slots=True)
class KvUse:
    """How full a pool is at one moment; the totals since its owner took it. Plain numbers, for whoever shows them."""

    blocks: int = 0  # all there are
    held: int = 0  # by streams
    cached: int = 0  # whole, nobody's, and found by whoever has the same prefix
    prefix_tokens: int = 0  # that streams looked for as they started
    prefix_hit_tokens: int = 0  # of these, found

    @property
    def usage(self) -> float:
        """The share that streams hold."""
        return self.held / self.blocks if self.blocks else 0.0

    @property
    def hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_tokens if self.prefix_tokens else 0.0


class Pool:
    """Block ids of one device for its owner. One thread; every act takes a few microseconds."""

    def __init__(self, index: Index, epoch: int, *, adoption: Adoption | None = None) -> None:
        count = index.geometry.block_count
        owner = index.owner
        if owner is None or owner.epoch != epoch:
            raise Misuse(f"epoch {epoch} does not own the index ({owner}); format or adopt it first")
        self.index = index
        self.epoch = epoch
        self._block_tokens = index.geometry.block_tokens
        self._adoption = adoption
        self._kinds = bytearray(adoption.verdicts if adoption else count)
        self._blocks = adoption.by_key if adoption else {}  # key → block
        self._keys: dict[int, bytes] = {}  # of adopted blocks only once they were held
        self._refs = [0] * count
        self._free = adoption.blocks_of(FREE) if adoption else list(range(count))  # taken from the end
        self._cached = Cached(adoption)
        self.fence_awaited = QUARANTINED in self._kinds  # soon, so that who can wait for room, should
        self._twins: dict[int, int] = {}
        self._tick = epoch << TICKS_PER_EPOCH_BITS
        self._asked_blocks = self._found_blocks = 0  # by `lookup`

    def __repr__(self) -> str:
        use = self.use()
        return (
            f"<kv pool epoch {self.epoch}: {self.free_count} free, {use.held} held, {use.cached} cached, "
            f"{self.quarantined_count} quarantined>"
        )

    def use(self) -> KvUse:
        """How full it is; another thread may ask."""
        count, cached, size = len(self._kinds), self.cached_count, self._block_tokens
        held = count - self.free_count - cached - self.quarantined_count
        return KvUse(count, held, cached, self._asked_blocks * size, self._found_blocks * size)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Whole blocks nobody holds: found by their key, and evicted when room is needed."""
        return len(self._cached)

    @property
    def awaited_count(self) -> int:
        """Of the cached ones, those of the dead owner's streams that have not come back."""
        return self._cached.awaited_count

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

    def adopted(self, key: bytes) -> bool:
        """Whether the last owner left a whole block of this key. If it is not found now, we have evicted it."""
        return self._adoption is not None and self._adoption.had(key)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, each held once more until `release`."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            self.hold(block)
            found.append(block)
        self._asked_blocks += len(keys)
        self._found_blocks += len(found)
        return found

    def find(self, key: bytes) -> int | None:
        """The whole block of this key, for `hold`. If it was awaited, it is so no more: somebody has come for it."""
        block = self._blocks.get(key)
        if block is not None:
            self._cached.found(block)
        return block

    def hold(self, block: int) -> None:
        """One hold more on a whole block, until `release`."""
        if self._kinds[block] not in (CACHED, HELD):
            raise Misuse(f"block {block} is not whole")
        self._refs[block] += 1
        if self._refs[block] > 1:
            return
        self._cached.take(block)
        self._kinds[block] = HELD
        if block not in self._keys:
            self._keys[block] = self._adopted_key(block)
        self._tick += 1
        self.index.set_heat(block, self._tick | LIVE)

    def fits(self, keys: Sequence[bytes], count: int, *, sparing: bool = False) -> bool:
        """Whether a sequence of `count` blocks, of which `keys` name the leading ones, would get them all from `lookup`
        and `allocate`. Only looks: no block's age changes, and what is awaited stays so."""
        if count <= len(self._free):
            return True
        found = [self._blocks[key] for key in keys[: self.match(keys)]]
        unheld = [block for block in found if not self._refs[block]]
        asked = count - len(found)
        if asked <= len(self._free):
            return True
        room = len(self._free) + len(self._cached) - len(unheld)
        if sparing:
            room -= self.awaited_count - sum(map(self._cached.is_awaited, unheld))
        return asked <= room

    def allocate(self, count: int = 1, *, sparing: bool = False) -> list[tuple[int, int]] | NoRoom:
        """That many open blocks with their generations, held once; all or none. What is evicted is withdrawn by the
        very store that opens it."""
        if len(self._free) < count:
            spared = self.awaited_count if sparing else 0
            if len(self._free) + len(self._cached) - spared < count:
                return NoRoom(count, len(self._free), self.quarantined_count, spared)
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
        the key: another one, if that was published before and is held. Then ours stays open (and its holder's), and
        the other is held with it: what the stream would need again after our death is not evicted under it. One that
        nobody holds makes way for ours: a text that is made again would else take its room twice."""
        other = self._blocks.get(key)
        if other is not None and other != block and self._refs[other]:
            if block not in self._twins:
                self.hold(other)
                self._twins[block] = other
            return other
        self._tick += 1
        self.index.publish(
            block, generation, key, epoch=self.epoch, depth=depth, tokens=self._block_tokens, heat=self._tick | LIVE
        )
        self._kinds[block] = HELD
        self._blocks[key] = block
        self._keys[block] = key
        if other is not None and other != block:  # after ours is there: an adopter finds one of them at any instant
            self._cached.take(other)
            self._keys.pop(other, None)
            self._become_free(other)
        return block

    def release(self, blocks: Sequence[int], *, live: bool = False) -> None:
        """Give up one hold on each, in the stream's order. An open one becomes free: to be called only when its last
        possible writer has retired, for cancelled and preempted streams too. `live`: the stream only waits for room,
        so after our death it is awaited like those that ran."""
        for block in reversed(blocks):  # the deepest becomes the oldest: a child is no use without its parent
            refs = self._refs[block] - 1
            if refs < 0:
                raise Misuse(f"block {block} is held by nobody")
            self._refs[block] = refs
            if not refs:
                self._let_go(block, LIVE if live else 0)

    # -- the pool as a whole

    def evict(self, count: int) -> int:
        """Make up to `count` cached blocks free; says how many."""
        count = min(count, len(self._cached))
        for _ in range(count):
            self._become_free(self._evict_one())
        return count

    def gpu_fence_passed(self) -> int:
        """All work of all earlier owners is over: quarantined blocks are free. Says how many those were."""
        block, blocks = -1, []
        while (block := self._kinds.find(QUARANTINED, block + 1)) >= 0:
            blocks.append(block)
            if self.index.state(block) != ENTRY_FREE:
                self.index.free(block)
            self._kinds[block] = FREE
        self._free[:0] = blocks  # taken last
        self.fence_awaited = False
        return len(blocks)

    def fence_is_late(self) -> None:
        """It will come, but nobody shall wait for room because of it."""
        self.fence_awaited = False

    def streams_resumed(self) -> None:
        """No stream of the dead owner is awaited any more: what none of them took is cached like anything else."""
        self._cached.await_no_more()

    def canary_passed(self) -> None:
        """What was adopted makes right tokens: the next adopter may believe it again."""
        self.index.store_owner(Owner(self.epoch, 0))

    def distrust(self) -> None:
        """What was computed here is not to be believed: the next adopter starts with nothing."""
        self.index.store_owner(Owner(self.epoch, ADOPTIONS_WITHOUT_CANARY_MAX))

    # -- inside

    def _let_go(self, block: int, live: int) -> None:
        if self._kinds[block] == OPEN:
            self._become_free(block)
            if block in self._twins:
                self.release((self._twins.pop(block),), live=bool(live))
            return
        self._tick += 1
        self.index.set_heat(block, self._tick | live)
        self._kinds[block] = CACHED
        self._cached.add(block)

    def _become_free(self, block: int) -> None:
        self.index.free(block)
        self._kinds[block] = FREE
        self._free.append(block)

    def _evict_one(self) -> int:
        """The next to go leaves the books; its entry changes with the store that follows."""
        block = self._cached.next_to_go()
        if block is None:
            raise Misuse("nothing is left to evict")
        self._cached.take(block)
        del self._blocks[self._keys.pop(block) if block in self._keys else self._adopted_key(block)]
        return block

    def _adopted_key(self, block: int) -> bytes:
        """From our own copy: a key damaged in the index since must not leave a withdrawn block findable."""
        assert self._adoption is not None
        return self._adoption.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]
