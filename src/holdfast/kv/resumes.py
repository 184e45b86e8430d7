"""What became of the streams that came back after an owner's death: whether their blocks were still there.

A stream that comes back with some of its answer was computed up to its last token but one before that token was shown,
so all of its full blocks had been published. If they are all found it is *resident*, and at most one block is left to
compute. If one is missing that the new owner adopted, it was *evicted* since. Else it is *missing*: evicted by an
owner before, made in another pool, or lost, which nobody here can tell apart; where there is room for all, it must not
happen. A stream that has shown nothing yet had perhaps no block at all, and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.kv.pool import Pool


def within_a_block(recomputed_tokens: int, block_tokens: int) -> bool:
    """Whether so many positions may have been computed again by a stream all of whose blocks were found: those behind
    its last full block. Up to a whole block: an engine may count its last token's, which is computed in any case."""
    return recomputed_tokens <= block_tokens


@dataclass(slots=True)
class Resumes:
    """Counts since the pool was taken over. Each stream that came back is resident, evicted or missing."""

    resumed_total: int = 0
    resumed_resident_total: int = 0
    resumed_evicted_total: int = 0
    resumed_missing_total: int = 0
    recomputed_tokens_total: int = 0  # KV positions that were not found; the last token's is never asked for
    recomputed_tokens_max: int = 0  # of one stream
    recomputed_tokens_resident_max: int = 0  # of one resident stream

    def count(self, pool: Pool, keys: Sequence[bytes], found: int, recomputed_tokens: int) -> None:
        """A stream is back: of the blocks it should have, `keys`, the first `found` were there."""
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
