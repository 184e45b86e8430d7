"""One request inside the sim engine, as the scheduler and the block books see it. Plain state, no rules."""

from __future__ import annotations

import math

from holdfast.core.requests import GenerateRequest
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID


class Stream:
    """`blocks` counts what it holds; the fields behind `held` are for books that have real pages."""

    __slots__ = (
        "at",
        "blocks",
        "cached",
        "decodes",
        "end",
        "fails_at",
        "full",
        "generations",
        "held",
        "keys",
        "number",
        "parent",
        "ready_at",
        "request",
        "resumed",
        "sequence",
        "stop_from",
        "stops",
        "tokens",
    )

    def __init__(self, number: int, sequence: Sequence, request: GenerateRequest, end: int) -> None:
        self.number = number
        self.sequence = sequence
        self.request = request
        self.end = end  # the length at which it finishes with "length"
        self.stops = frozenset(request.stop_token_ids)
        if not request.sampling.ignore_eos:
            self.stops |= {EOS_TOKEN_ID}
        # A stop token counts once more than min_tokens were made: it comes on top of them, as in vLLM.
        self.stop_from = request.prompt_len + request.sampling.min_tokens
        self.fails_at: int | None = None  # a fault: the length at which it fails
        self.blocks = 0
        self.decodes = False  # has made a token since it started to run
        self.ready_at = math.inf  # when its prefill is over; inf while it waits
        self.resumed = len(request.tokens) > request.prompt_len  # and not yet counted as such
        self.tokens: list[int] = request.tokens  # with real pages: a copy that grows
        self.held: list[int] = []  # blocks in the text's order
        self.generations: list[int] = []  # of the open ones: the last so many of `held`
        self.cached = 0  # positions whose KV was found when it last began to run
        self.keys: list[bytes] | None = None  # of the text's full blocks; None: not yet computed
        self.parent = b""  # the key of its last full block
        self.full = 0  # how many of `held` are full
        self.at = -1  # where its last token's KV goes, as a word of the pages; -1: its text's is not written yet
