"""Computes a step of the sim engine: it reads what a token depends on from KV pages, and writes its result there.

A position's KV is its token's id, four bytes. Always true: a text is what its pages say when it starts, not what its
request says; a step writes the positions of its plan and no others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from holdfast.core.requests import TokenLogprobs
from holdfast.engines.paged.sequences import Segment, StepPlan
from holdfast.engines.sim.faults import Faults
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import Vocabulary
from holdfast.kv.geometry import Geometry
from holdfast.kv.index import index_bytes
from holdfast.spec.engines import GIB, SimSettings

TOKEN_BYTES = 4
SLAB_BYTES = 2 * 1024 * 1024  # the smallest on any device, and all are multiples of it


def geometry(weights: str, block_size: int, kv_blocks: int) -> Geometry:
    """Return a pool geometry with keys and values of two bytes each: together they hold a token's id."""
    made = Geometry(weights, "uint8", block_size, layers=1, kv_heads=1, head_size=2, block_count=kv_blocks)
    assert made.block_bytes == block_size * TOKEN_BYTES
    return made


def weights_bytes(settings: SimSettings) -> int:
    """Return what is left of its memory beside its pages."""
    return round(settings.vault_gib * GIB) - settings.kv_blocks * settings.block_size * TOKEN_BYTES


def vault_bytes(settings: SimSettings) -> int:
    """Return what a sim engine has in its vault: weights, pages and their index, each in whole slabs."""
    pages, weights = settings.kv_blocks * settings.block_size * TOKEN_BYTES, weights_bytes(settings)
    index = index_bytes(geometry("", settings.block_size, settings.kv_blocks))
    sizes = [-(-size // SLAB_BYTES) * SLAB_BYTES for size in (max(SLAB_BYTES, weights), pages, index)]
    return sum(sizes) + SLAB_BYTES * (1 + sizes[0] // GIB)  # tensors are aligned, in slabs of a GiB


class SimComputer:
    """`weights_right` reads of the weights what a step needs."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        pages: memoryview,
        block_size: int,
        faults: Faults,
        weights_right: Callable[[], bool] = lambda: True,
    ) -> None:
        self._vocabulary = vocabulary
        self._words = pages.cast("I")
        self._pages = pages
        self._block_size = block_size
        self._faults = faults
        self._weights_right = weights_right

    def close(self) -> None:
        """Let go of the pages, so that they can be unmapped."""
        self._words.release()
        self._pages.release()

    def compute(self, plan: StepPlan) -> tuple[dict[int, int], dict[int, TokenLogprobs]]:
        """Return the tokens that the step draws, by stream, and the logprobs of those that asked for them."""
        words, size, drift = self._words, self._block_size, self._faults.logprob_drift
        wrong = not self._weights_right() or self._faults.wrong_tokens
        drawn: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        for segment in plan.segments:
            stream, start = segment.owner, segment.start
            text: Sequence | None = stream.kept
            if text is not None:
                words[segment.blocks[start // size] * size + start % size] = segment.tokens[0]
            else:
                self._write(segment)
                if not segment.wants_token:
                    continue
                stream.kept = text = self._read(segment)
            drawn[stream.number] = text.advance(wrong=wrong, drift=drift)
            if text.logprobs is not None:
                logprobs[stream.number] = text.logprobs
        return drawn, logprobs

    def _write(self, segment: Segment) -> None:
        size, start, end = self._block_size, segment.start, segment.position
        tokens = memoryview(array("I", segment.tokens))
        for at in range(start // size * size, end, size):
            first, last = max(at, start), min(at + size, end)
            block_start = segment.blocks[at // size] * size - at
            self._words[block_start + first : block_start + last] = tokens[first - start : last - start]

    def _read(self, segment: Segment) -> Sequence:
        """Return all of its text up to the segment's end: what its pages had before, and what it has just written."""
        size, start, request = self._block_size, segment.start, segment.owner.request
        text, block_bytes = array("I"), size * TOKEN_BYTES
        for block in segment.blocks[: -(-start // size)]:
            text.frombytes(self._pages[block * block_bytes : (block + 1) * block_bytes])
        del text[start:]
        text.extend(array("I", segment.tokens))
        return Sequence(self._vocabulary, text, request.prompt_len, request.sampling, request.stop_token_ids)
