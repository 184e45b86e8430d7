"""A stream inside an engine, and what one step does for it. Plain state; the rules are the scheduler's.

Positions are places in the stream's text, prompt first. A step *computes* the KV of some positions and, where these
reach the end of the text, *draws* the token of the next one. Always true: `planned` <= `length`, and blocks cover
every planned position; a drawn token is known here only when its step has retired (`pending` of them are not yet).
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.requests import GenerateRequest, Sampling

# In a segment's tokens: the token that the stream drew in the step before, which only the device knows yet.
PENDING = -1


class Stream:
    """One request. The fields from `blocks` on are kept by the block books."""

    __slots__ = (
        "asked",
        "begun",
        "blocks",
        "cached",
        "end",
        "generations",
        "gone",
        "held",
        "in_flight",
        "kept",
        "keys",
        "number",
        "pending",
        "planned",
        "prompt_len",
        "published",
        "request",
        "resumed",
        "runs",
        "stop_from",
        "stops",
        "tokens",
        "turn",
    )

    def __init__(self, number: int, request: GenerateRequest, end: int, eos_token_ids: frozenset[int]) -> None:
        sampling = request.sampling
        self.number = number
        self.request = request
        self.prompt_len = request.prompt_len
        self.tokens = list(request.tokens)  # all that is known of its text
        self.asked = len(self.tokens)  # what the request brought of it
        self.end = end  # the length at which it finishes with "length"
        self.stops = frozenset(request.stop_token_ids)
        if not sampling.ignore_eos:
            self.stops |= eos_token_ids
        # A stop token counts once more than min_tokens were made: it comes on top of them, as in vLLM.
        self.stop_from = request.prompt_len + sampling.min_tokens
        self.cached = 0  # positions whose KV was found when it first began to run
        self.planned = 0  # positions whose KV is there or will be when all planned steps have retired
        self.pending = 0  # tokens drawn by steps that have not retired
        self.in_flight = 0  # steps that have not retired and may write its blocks
        self.turn = (0, 0)  # of those that wait, the smallest runs next
        self.runs = False  # has a place and blocks, and is planned
        self.begun = False  # it runs, or ran and was preempted
        self.held = False  # by its engine: it has its place and blocks, and no step takes it until it is let go
        self.kept: Any = None  # what its engine keeps of it from step to step, as long as it has its blocks
        self.gone = False  # cancelled or finished: nothing more is said of it
        self.resumed = len(request.tokens) > request.prompt_len  # and not yet counted as such
        self.blocks: list[int] = []  # in the text's order; a list only grows, and every start makes a new one
        self.generations: list[int] = []  # of `blocks`; 0 for those that were found
        self.keys: list[bytes] = []  # of the text's leading full blocks, as far as anyone asked
        self.published = 0  # how many leading blocks are full and said to be so

    def __repr__(self) -> str:
        held = f"{len(self.blocks)} blocks, {self.published} full"
        return f"<stream {self.number}: {self.planned} of {self.length} positions planned, {held}>"

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def length(self) -> int:
        """Of the text, tokens that are drawn but not yet known included."""
        return len(self.tokens) + self.pending

    @property
    def shown(self) -> bool:
        """Somebody has read some of its answer."""
        return len(self.tokens) > self.prompt_len

    @property
    def missing(self) -> int:
        """Positions still to be planned."""
        return len(self.tokens) + self.pending - self.planned


class Segment(msgspec.Struct, frozen=True, gc=False):
    """What one step computes for one stream: the KV of `tokens` at positions from `start` on. A struct: one is made for
    every token, and this is made in a fifth of a dataclass's time."""

    owner: Stream
    tokens: list[int]  # ids, or [PENDING]
    start: int
    blocks: list[int]  # the stream's block table, the very list: it may grow later, what it has does not change
    wants_token: bool  # they reach the end of the text: draw the next token

    @property
    def stream(self) -> int:
        return self.owner.number

    @property
    def position(self) -> int:
        """Of the token that is drawn."""
        return self.start + len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True):
    """One step: segments of one token first (decodes), then chunks of prompts."""

    number: int
    segments: list[Segment]

    @property
    def drawing(self) -> list[Segment]:
        """The segments that draw a token, in the order of a batch's sampling rows."""
        return [segment for segment in self.segments if segment.wants_token]

    @property
    def token_count(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)
