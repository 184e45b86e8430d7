"""An engine of your own that survives `kill -9`: it counts.

The next token is the first one of the text plus the last one plus a stride. A position's KV is its token's id, and the
stride is all its weights. Both lie in a vault's memory: an heir maps them, finds the KV of every stream, and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines import BytesPlan, Canary, Geometry, PagedEngine, SchedulerSettings, StepPlan

VOCABULARY, BLOCK, STRIDE = 1000, 16, 7


def count(first: int, last: int, stride: int) -> int:
    return (first + last + stride) % VOCABULARY


def known_answer() -> Canary:
    """What every engine with these weights says to a fixed question: it is asked before and after each takeover."""
    prompt = list(range(24))
    text = list(prompt)
    for _ in range(8):
        text.append(count(text[0], text[-1], STRIDE))
    return Canary(GenerateRequest("canary", prompt, 24, Sampling(8, 0, ignore_eos=True)), tuple(text[24:]))


class CountingEngine(PagedEngine):
    """Made into an engine by `VaultEngine(CountingEngine(), FailoverSettings(vault_socket))`."""

    def __init__(self, kv_blocks: int = 512, context_tokens_max: int = 4096, **limits: int) -> None:
        self.plan = BytesPlan(f"counting by {STRIDE}", {"stride": bytes([STRIDE])})
        # Keys and values of two bytes each have room for a token's id.
        shape = {"layers": 1, "kv_heads": 1, "head_size": 2, "block_count": kv_blocks}
        geometry = Geometry(self.plan.identity, "uint8", BLOCK, **shape)
        settings = SchedulerSettings(VOCABULARY, frozenset(), min(context_tokens_max, kv_blocks * BLOCK), **limits)
        super().__init__(self.plan, geometry, settings, known_answer())

    def compute(self, plan: StepPlan, pages: memoryview) -> Mapping[int, int]:
        drawn, stride = {}, self.plan.views["stride"][0]
        with pages.cast("I") as words:
            for segment in plan.segments:
                places = [segment.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(segment.position)]
                for place, token in zip(places[segment.start :], segment.tokens, strict=True):
                    words[place] = token
                if segment.wants_token:
                    drawn[segment.stream] = count(words[places[0]], words[places[-1]], stride)
        return drawn
