"""The owner's allocator over an index: decides which block is free, held, cached, awaited or quarantined.

Always true:
- A block is handed out only through `Index.open`, so an adopter finds only complete blocks FULL.
- A block that a stream holds is never evicted.
- *Awaited* blocks are evicted last (`Cached`): streams of the last owner will look for them when they resume.
  Otherwise streams that resume early would evict the blocks of those that resume late.
- `sparing=True` allocates no awaited block. This is useful while quarantined blocks are about to become free.
- A quarantined block is not touched before the GPU fence of all earlier owners (facts 4b).

No I/O, no clock: "last use" is a counter of the pool's own operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.kv.geometry import KEY_BYTES
from holdfast.kv.index import ADOPTIONS_WITHOUT_CANARY_MAX, LIVE, Index, IndexOwner, Misuse
from holdfast.kv.index import FREE as ENTRY_FREE

if TYPE_CHECKING:  # adopt.py loads numpy, which an owner of a new pool does not need
    from holdfast.kv.adopt import Adoption


YOURS = 1  # `adopt`'s verdict by the same number


class Cached:
    """Whole blocks that no stream holds, in the order of eviction.

    Eviction order:
    - adopted blocks that no stream used when the last owner died, the longest unused first
    - blocks released since the adoption, the longest unused first
    - *awaited* blocks: their streams ran when the last owner died and have not resumed yet. The deepest go first (a
      block without its parent is unreachable).

    Always true: a block that was taken is not evicted. The index is read once, to order the adopted blocks.
    """

    def __init__(self, adoption: Adoption | None) -> None:
        self._adoption = adoption
        # One byte per block: 1 until an adopted block is taken.
        kept = bytes(verdict == YOURS for verdict in range(256))
        self._adopted = bytearray(adoption.verdicts.translate(kept) if adoption else b"")
        self._count = self._adopted.count(1)
        self._cool: OrderedDict[int, None] = OrderedDict()  # released here, oldest first
        # Adopted blocks, the next to evict at the end; those taken since are skipped.
        self._cold: list[int] | None = None  # None: not sorted yet
        self._awaited: list[int] = []
        self._awaited_left: set[int] = set()  # `_awaited` without the taken and evicted blocks

    def __len__(self) -> int:
        return self._count

    @property
    def awaited_count(self) -> int:
        self._order()
        return len(self._awaited_left)

    def is_awaited(self, block: int) -> bool:
        self._order()
        return block in self._awaited_left

    def add(self, block: int) -> None:
        """Add a block that its last holder released."""
        self._cool[block] = None
        self._count += 1

    def take(self, block: int) -> None:
        """Remove a block that is held again or no longer needed."""
        if block in self._cool:
            del self._cool[block]
        else:
            self._adopted[block] = 0
            self._awaited_left.discard(block)
        self._count -= 1

    def found(self, block: int) -> None:
        """Note that a stream looks for a block, held or not. An adopted one is from now on like one released here just
        now."""
        if self._adopted and self._adopted[block]:
            self.take(block)
            self.add(block)

    def next_to_go(self) -> int | None:
        """Return the next block to evict, which stays until it is taken."""
        cold, awaited = self._order()
        block = self._last(cold)
        if block is None and self._cool:
            block = next(iter(self._cool))
        return self._last(awaited) if block is None else block

    def await_no_more(self) -> None:
        """Treat what no stream came back for like anything else that is cached, as the oldest of it."""
        cold, awaited = self._order()
        self._cold = awaited + cold
        self._awaited = []
        self._awaited_left = set()

    def _last(self, order: list[int]) -> int | None:
        while order and not self._adopted[order[-1]]:
            order.pop()
        return order[-1] if order else None

    def _order(self) -> tuple[list[int], list[int]]:
        """Sort the adopted blocks when room first runs short, not at adoption: that would delay the resumed streams."""
        if self._cold is None:
            self._cold = []
            if self._adoption is not None:
                cold, awaited = self._adoption.coldest_first(bytes(self._adopted))
                self._cold, self._awaited = cold[::-1], awaited[::-1]
                self._awaited_left = set(awaited)
        return self._cold, self._awaited


# The states of a block in the pool. The first four have the numbers of `adopt`'s verdicts.
FREE, CACHED, _, QUARANTINED, OPEN, HELD = range(6)
# An owner's ticks are larger than those of all owners before it: epochs are milliseconds, and a Python process makes
# fewer than 2**14 operations per millisecond. 48 + 14 bits stay below the LIVE bit.
TICKS_PER_EPOCH_BITS = 14


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Refusal: fewer than `asked` blocks are available. `quarantined` blocks become free at the GPU fence, held ones
    when streams end. `spared` counts awaited blocks, which a caller with `sparing` does not get."""

    asked: int
    free: int
    quarantined: int
    spared: int = 0


@dataclass(frozen=True, slots=True)
class KvUse:
    """Usage of a pool at one moment, and prefix totals since its owner took it."""

    blocks: int = 0  # all blocks of the pool
    held: int = 0  # by streams
    cached: int = 0  # whole and held by no stream; a request with the same prefix reuses them
    prefix_tokens: int = 0  # that streams looked up when they started
    prefix_hit_tokens: int = 0  # of these, found

    @property
    def usage(self) -> float:
        """Return the share of blocks that streams hold."""
        return self.held / self.blocks if self.blocks else 0.0

    @property
    def hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_tokens if self.prefix_tokens else 0.0


class Pool:
    """Allocates the block ids of one device for its owner. For one thread; each call takes a few microseconds."""

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
        self._keys: dict[int, bytes] = {}  # an adopted block is added when it is first held
        self._refs = [0] * count
        self._free = adoption.blocks_of(FREE) if adoption else list(range(count))  # taken from the end
        self._cached = Cached(adoption)
        self.fence_awaited = QUARANTINED in self._kinds  # True: the GPU fence frees blocks soon, so wait
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
        """Return the pool's usage. Safe to call from another thread."""
        count, cached, size = len(self._kinds), self.cached_count, self._block_tokens
        held = count - self.free_count - cached - self.quarantined_count
        return KvUse(count, held, cached, self._asked_blocks * size, self._found_blocks * size)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Return the number of whole blocks that no stream holds. `lookup` finds them until they are evicted."""
        return len(self._cached)

    @property
    def awaited_count(self) -> int:
        """Return how many cached blocks belong to the dead owner's streams that have not resumed."""
        return self._cached.awaited_count

    @property
    def quarantined_count(self) -> int:
        return self._kinds.count(QUARANTINED)

    # -- a stream's blocks

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a sequence the pool has."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def adopted(self, key: bytes) -> bool:
        """Return True if the last owner left a whole block of this key. If it is missing now, this pool evicted it."""
        return self._adoption is not None and self._adoption.had(key)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix. Each gets one more hold, until `release`."""
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
        """Return the whole block of this key, for `hold`. It no longer counts as awaited: its stream has resumed."""
        block = self._blocks.get(key)
        if block is not None:
            self._cached.found(block)
        return block

    def hold(self, block: int) -> None:
        """Add a hold on a whole block, until `release`."""
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
        """Return True if `lookup` and `allocate` would get a sequence all its `count` blocks. `keys` name the leading
        ones. Changes nothing."""
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
        """Open `count` blocks, hold each once, and return them with their generations; all or none. The store that
        opens an evicted block also withdraws its old content."""
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
        """Publish a block, after the step that filled it has retired and before a client sees its tokens. Return the
        block that the key now maps to.

        If another block already has this key:
        - If a stream holds it, return that block. Ours stays open and keeps a hold on it, so that the stream finds it
          if we die.
        - Otherwise free it and publish ours: the same content must not take room twice.
        """
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
        if other is not None and other != block:  # after publishing ours: an adopter always finds one of them
            self._cached.take(other)
            self._keys.pop(other, None)
            self._become_free(other)
        return block

    def release(self, blocks: Sequence[int], *, live: bool = False) -> None:
        """Release one hold on each block, given in the stream's order. An open block becomes free, so call this only
        after its last possible writer has retired, also for cancelled and preempted streams. `live` means that the
        stream only waits for room: if we die, its blocks are awaited like those of running streams."""
        for block in reversed(blocks):  # the deepest becomes the oldest: a child is unreachable without its parent
            refs = self._refs[block] - 1
            if refs < 0:
                raise Misuse(f"block {block} is not held")
            self._refs[block] = refs
            if not refs:
                self._let_go(block, LIVE if live else 0)

    # -- the pool as a whole

    def evict(self, count: int) -> int:
        """Free up to `count` cached blocks; return how many were freed."""
        count = min(count, len(self._cached))
        for _ in range(count):
            self._become_free(self._evict_one())
        return count

    def gpu_fence_passed(self) -> int:
        """Free the quarantined blocks, because all GPU work of earlier owners has ended. Return how many there were."""
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
        """Note that the GPU fence will come late, so that no stream waits for the blocks it frees."""
        self.fence_awaited = False

    def streams_resumed(self) -> None:
        """Stop waiting for streams of the dead owner: treat the remaining awaited blocks like other cached blocks."""
        self._cached.await_no_more()

    def canary_passed(self) -> None:
        """Record that the adopted blocks give correct tokens, so that the next adopter may reuse the pool."""
        self.index.store_owner(IndexOwner(self.epoch, 0))

    def distrust(self) -> None:
        """Record that this pool's content is suspect: the next adopter reuses no block."""
        self.index.store_owner(IndexOwner(self.epoch, ADOPTIONS_WITHOUT_CANARY_MAX))

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
        """Remove the next block to evict from the pool's maps and return it. The caller changes its index entry."""
        block = self._cached.next_to_go()
        if block is None:
            raise Misuse("nothing is left to evict")
        self._cached.take(block)
        del self._blocks[self._keys.pop(block) if block in self._keys else self._adopted_key(block)]
        return block

    def _adopted_key(self, block: int) -> bytes:
        """Return the key from the adoption's copy. The index's copy may be damaged; then an evicted block would stay
        in `_blocks`."""
        assert self._adoption is not None
        return self._adoption.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]


# -- streams that came back


def within_a_block(recomputed_tokens: int, block_tokens: int) -> bool:
    """Return True if a stream that found all its blocks may have recomputed this many positions: those after its last
    full block. One whole block is allowed, because an engine may count the last token, which is always computed."""
    return recomputed_tokens <= block_tokens


@dataclass(slots=True)
class Resumes:
    """Counts of the streams that resumed after an owner's death, since the pool was adopted.

    When a client sees a token, all full blocks before it have been published. So a stream that resumes with part of its
    answer is one of:
    - *resident*: all its full blocks are found, and at most one block is left to compute.
    - *evicted*: the first block not found was adopted, so this owner evicted it.
    - *missing*: the block was evicted by an earlier owner, made in another pool, or lost; the pool cannot tell which.
      If there is room for all streams, this must not happen.

    A stream that has shown no token yet may have no block, and is not counted."""

    resumed_total: int = 0
    resumed_resident_total: int = 0
    resumed_evicted_total: int = 0
    resumed_missing_total: int = 0
    recomputed_tokens_total: int = 0  # KV positions not found; the last token's is never looked up
    recomputed_tokens_max: int = 0  # of one stream
    recomputed_tokens_resident_max: int = 0  # of one resident stream

    def count(self, pool: Pool, keys: Sequence[bytes], found: int, recomputed_tokens: int) -> None:
        """Count a resumed stream: of the blocks it should have, `keys`, the first `found` were in the pool."""
        self.resumed_total += 1
        self.recomputed_tokens_total += recomputed_tokens
        self.recomputed_tokens_max = max(self.recomputed_tokens_max, recomputed_tokens)
        if found == len(keys):
            self.resumed_resident_total += 1
            self.recomputed_tokens_resident_max = max(self.recomputed_tokens_resident_max, recomputed_tokens)
        elif pool.adopted(keys[found]):
            self.resumed_evicted_total += 1
        else:
            self.resumed_missing_total += 1
