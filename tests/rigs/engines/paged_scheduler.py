"""A scheduler over a real pool, and a device that plays the model: a position's KV is a name for all text up to it.

The device reads what a step would read and finds any page that is not what it should be; it writes as late as it may,
when the step retires, and only to blocks that are open then. The next token is a function of the text alone, so
`unbroken` tells what every stream must say, whatever ran beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

from holdfast.core.requests import GenerateRequest, Output, Sampling
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.paged.sequences import PENDING, PagedStream, Segment, StepPlan
from holdfast.kv import adopt
from holdfast.kv.geometry import Geometry, block_keys
from holdfast.kv.index import FULL, OPEN, Index, index_bytes
from holdfast.kv.pool import Pool

SIZE = 4
VOCABULARY = 50
EOS = 49
STEPS_MAX = 2000  # no story here takes a tenth of it; a scheduler that stands still reaches it


def request(tokens: Iterable[int], max_tokens: int = 8, prompt_len: int = 0, **given: object) -> GenerateRequest:
    text = list(tokens)
    stops = given.pop("stops", [])
    sampling = Sampling(max_tokens, 1, **given)  # type: ignore[arg-type]
    return GenerateRequest("r", text, prompt_len or len(text), sampling, stops)  # type: ignore[arg-type]


def name(text: list[int]) -> bytes:
    return blake2b(bytes(text), digest_size=8).digest()


def next_token(text: list[int]) -> int:
    return int.from_bytes(name(text), "little") % VOCABULARY


def unbroken(asked: GenerateRequest, length_max: int) -> list[int]:
    """What the stream must say."""
    text, sampling = list(asked.tokens), asked.sampling
    stops = set(asked.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    end = min(asked.prompt_len + sampling.max_tokens, length_max)
    while len(text) < end:
        text.append(next_token(text))
        if text[-1] in stops and len(text) > asked.prompt_len + sampling.min_tokens:
            break
    return text[len(asked.tokens) :]


class World:
    """One owner after the other; `step` is what an engine's loop does."""

    def __init__(self, block_count: int = 8, lookahead: int = 0, *, holds: bool = False, **given: int) -> None:
        self.holds = holds  # whether streams are held when they start, until `let_go`
        self.geometry = Geometry("w", "float32", SIZE, 1, 1, 1, block_count)
        self.index = Index(bytearray(index_bytes(self.geometry)), self.geometry)
        self.index.format(10)
        self.settings = SchedulerSettings(
            vocabulary=VOCABULARY,
            eos_token_ids=frozenset({EOS}),
            lookahead=lookahead,
            **{"context_tokens_max": 64, "concurrency": 4, "queue": 4, "step_tokens_max": 8} | given,
        )
        self.pages: dict[tuple[int, int], bytes] = {}
        self._own(Pool(self.index, 10))

    def _own(self, pool: Pool) -> None:
        self.pool = pool
        self.blocks = PoolBlocks(pool)
        self.scheduler = Scheduler(self.settings, self.blocks, self._started)
        self.queue: deque[tuple[StepPlan, dict[int, int]]] = deque()
        self.texts: dict[PagedStream, list[int]] = {}  # as the device knows them

    def _started(self, stream: PagedStream) -> None:
        stream.held = self.holds

    def let_go(self) -> bool:
        """Of all that are held; whether there are any."""
        held = [stream for stream in self.scheduler.running.values() if stream.held]
        for stream in held:
            stream.held = False
        return bool(held)

    def die_and_adopt(self, fence: bool = True) -> None:
        """The owner is killed with steps in flight; the next one adopts what was published."""
        epoch = self.pool.epoch + 1
        self._own(Pool(self.index, epoch, adoption=adopt.adopt(self.index, epoch)))
        if fence:
            self.pool.gpu_fence_passed()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        drawn: dict[int, int] = {}
        for segment in plan.segments:
            assert not segment.owner.held
            text = self._text(segment)
            if segment.wants_token:
                token = next_token(text)
                drawn[segment.stream] = token
                self.texts[segment.owner] = [*text, token]
        self.queue.append((plan, drawn))
        return plan

    def _text(self, segment: Segment) -> list[int]:
        """All of the stream's text up to the segment's end, and what the plan says of it, checked."""
        whole = self.texts.get(segment.owner, segment.owner.tokens)
        text = whole[: segment.position]
        assert len(text) == segment.position, "positions are contiguous"
        assert segment.tokens == [PENDING] or segment.tokens == text[segment.start :]
        assert len(segment.blocks) * SIZE >= segment.position, "blocks cover what is written"
        for position in range(segment.start, segment.position):
            assert self.index.state(segment.blocks[position // SIZE]) == OPEN, "open before it may be written"
        return list(text)

    def retire(self) -> list[Output]:
        plan, drawn = self.queue.popleft()
        for segment in plan.segments:
            self._run(segment)
        outputs = self.scheduler.retire(plan, drawn)
        for segment in plan.segments:
            self._check_published(segment)
        return outputs

    def _run(self, segment: Segment) -> None:
        text = self.texts.get(segment.owner, segment.owner.tokens)
        for position in range(segment.position):
            block, slot = segment.blocks[position // SIZE], position % SIZE
            if position >= segment.start:
                assert self.index.state(block) == OPEN, "no other has it while a step may write it"
                self.pages[block, slot] = name(text[: position + 1])
            assert self.pages[block, slot] == name(text[: position + 1]), "a step reads this stream's own past"

    def _check_published(self, segment: Segment) -> None:
        """By the time the outputs are out, every full block of a stream that lives on is found by its key."""
        if segment.owner.runs:
            keys = block_keys(self.geometry.root(), segment.owner.tokens[: segment.position], SIZE)
            assert self.pool.match(keys) == len(keys) == segment.owner.published

    def step(self) -> list[Output]:
        """Plan a step, if there is one and it may be planned; retire one, if as many are in flight as may be or nothing
        can be planned."""
        planned = self.plan() if len(self.queue) <= self.settings.lookahead else None
        if planned is None and not self.queue and self.let_go():
            planned = self.plan()
        return self.retire() if self.queue and (planned is None or len(self.queue) > self.settings.lookahead) else []

    def drain(self) -> list[Output]:
        """Until nothing is left to do; the scheduler must never stand still before that."""
        outputs = self.scheduler.take_early()
        for _ in range(STEPS_MAX):
            before = (self.scheduler.steps, len(self.queue))
            outputs += self.step()
            if before == (self.scheduler.steps, len(self.queue)):
                break
        assert not self.scheduler.running, "it stands still with streams running"
        assert not self.scheduler.waiting, "it stands still with streams waiting"
        return outputs

    def check_books(self) -> None:
        """Every block is free, cached, quarantined or held; held ones are those of streams."""
        pool, scheduler = self.pool, self.scheduler
        live = set(scheduler.running.values()) | {
            segment.owner for plan, _ in self.queue for segment in plan.segments if segment.owner.blocks
        }
        held = {block for stream in live for block in stream.blocks}
        assert self.blocks.used == sum(len(stream.blocks) for stream in live)
        twins = set(pool._twins.values())
        accounted = pool.free_count + pool.cached_count + pool.quarantined_count + len(held | twins)
        assert accounted == self.geometry.block_count, "a block is lost, or counted twice"
        for block in held:
            assert self.index.state(block) in (OPEN, FULL)
        for stream in scheduler.waiting:
            assert not stream.blocks or stream.in_flight
