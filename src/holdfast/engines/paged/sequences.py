"""A stream inside an engine, and what one step does for it. Plain state; the scheduler has the rules.

Positions are indexes into the stream's text, prompt first. A step *computes* the KV of some positions and, if these
reach the end of the text, *draws* the next token.

Always true: `planned` <= `length`, and blocks cover every planned position. A drawn token is known here only when its
step has retired; `pending` tokens are not known yet.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec

from holdfast.core.requests import GenerateRequest, Sampling

# In a segment's tokens: the token that the stream's previous step drew, which only the device knows yet.
PENDING = -1


@dataclass(slots=True, eq=False)
class PagedStream:
    """One request in the scheduler. `Blocks` keeps the fields from `blocks` on."""

    number: int
    request: GenerateRequest
    end: int  # the length at which it finishes with "length"
    eos_token_ids: InitVar[frozenset[int]]
    prompt_len: int = field(init=False)
    tokens: list[int] = field(init=False)  # its text, as far as known
    asked: int = field(init=False)  # length of the text in the request
    stops: frozenset[int] = field(init=False)
    stop_from: int = field(init=False)
    cached: int = 0  # positions whose KV was found when it first began to run
    planned: int = 0  # positions whose KV is there, or will be when all planned steps have retired
    pending: int = 0  # tokens drawn by steps that have not retired
    in_flight: int = 0  # steps that have not retired and may write its blocks
    turn: tuple[int, int] = (0, 0)  # the waiting stream with the smallest runs next
    runs: bool = False  # has a slot and blocks
    begun: bool = False  # it runs, or ran and was preempted
    held: bool = False  # by its engine: it has a slot and blocks, but is in no step until the engine clears this
    kept: Any = None  # the engine's state between steps, as long as the stream has its blocks
    gone: bool = False  # cancelled or finished: no further output
    resumed: bool = field(init=False)  # the request came with some of its answer, and is not yet counted as resumed
    blocks: list[int] = field(default_factory=list)  # in the text's order; only grows, and each start makes a new list
    generations: list[int] = field(default_factory=list)  # of `blocks`; 0 for found blocks
    keys: list[bytes] = field(default_factory=list)  # of the text's leading full blocks, as far as they were needed
    published: int = 0  # how many leading blocks are full and published

    def __post_init__(self, eos_token_ids: frozenset[int]) -> None:
        request = self.request
        self.prompt_len = request.prompt_len
        self.tokens = list(request.tokens)
        self.asked = len(self.tokens)
        self.stops = frozenset(request.stop_token_ids)
        if not self.sampling.ignore_eos:
            self.stops |= eos_token_ids
        # A stop token counts only after min_tokens other tokens, as in vLLM.
        self.stop_from = request.prompt_len + self.sampling.min_tokens
        self.resumed = self.shown

    def __repr__(self) -> str:
        held = f"{len(self.blocks)} blocks, {self.published} full"
        return f"<stream {self.number}: {self.planned} of {self.length} positions planned, {held}>"

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def length(self) -> int:
        """Return the length of the text, including tokens that are drawn but not yet known."""
        return len(self.tokens) + self.pending

    @property
    def shown(self) -> bool:
        """Return True if a client has read some of its answer."""
        return len(self.tokens) > self.prompt_len

    @property
    def missing(self) -> int:
        """Return the number of positions still to be planned."""
        return len(self.tokens) + self.pending - self.planned


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One step's work for one stream: the KV of `tokens` at positions from `start` on. One is made for every token: a
    struct takes a fifth of a dataclass's time."""

    owner: PagedStream
    tokens: list[int]  # ids, or [PENDING]
    start: int
    blocks: list[int]  # the stream's own block table, not a copy: it may grow, but entries do not change
    wants_token: bool  # `tokens` reach the end of the text: draw the next token

    @property
    def stream(self) -> int:
        return self.owner.number

    @property
    def position(self) -> int:
        """Return the position of the drawn token."""
        return self.start + len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True):
    """One step: its segments of one token (decodes) come first, then chunks of prompts."""

    number: int
    segments: list[Segment]

    @property
    def drawing(self) -> list[Segment]:
        """Return the segments that draw a token, in the order of a batch's sampling rows."""
        return [segment for segment in self.segments if segment.wants_token]

    @property
    def token_count(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)
