"""vLLM's EngineCore and what Holdfast has beside it, in the step thread.

Always true: everything here but `attach`, `use` and `running` is called in the step thread; a request that
comes back is counted by what of it is found before vLLM looks.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from holdfast.core.errors import Refused, UserError
from holdfast.core.requests import GenerateRequest, TokenLogprobs
from holdfast.engines.paged.canary import Dropped
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.engines.vllm.canary import Answer
from holdfast.engines.vllm.kv_home import KvHome
from holdfast.engines.vllm.ranks.executor import LeadingExecutor
from holdfast.engines.vllm.ranks.leader import Leader
from holdfast.engines.vllm.requests import Order, engine_request, output_of
from holdfast.engines.vllm.sampling import bring_back, note_found
from holdfast.engines.vllm.scheduler import namer
from holdfast.engines.vllm.stepper import Stepper
from holdfast.engines.vllm.worker import Rooms, let_in
from holdfast.kv.pool import KvUse, Pool
from holdfast.kv.resumes import Resumes
from holdfast.memory.devices.contract import DeviceError

# How vLLM says that its KV cache is too small for one text of the context's length, and what it would have one do.
NO_ROOM = ("No available memory for the cache blocks", "larger than the available KV cache memory")
ITS_MENDS = " Try increasing"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """How much KV a stream alone can have."""

    count: int
    block_tokens: int


def make_core(
    config: Any, rooms: Rooms, scheduling: SchedulerSettings, stepper: Stepper, leader: Leader, *, native: bool
) -> VllmCore:
    """In the step thread; as long as vLLM takes to load and to warm up."""
    executor = UniProcExecutor if leader.count == 1 else LeadingExecutor
    with let_in(rooms), in_our_words():
        engine = EngineCore(config, executor, log_stats=False)
    leader.met()
    return VllmCore(engine, scheduling, rooms.kv, stepper, leader, native=native)


@contextmanager
def in_our_words() -> Iterator[None]:
    """What vLLM raises while it makes its engine may be anything: whoever started this one is told a sentence."""
    try:
        yield
    except (UserError, OSError, DeviceError):
        raise
    except Exception as error:
        log.exception("vLLM's engine cannot be made")
        said = " ".join(str(error).split()) or type(error).__name__
        if any(words in said for words in NO_ROOM):
            short = said.partition(ITS_MENDS)[0].rstrip(".")
            raise Refused(f"the KV pool is too small ({short}): use more --kv-gib, or a smaller --context") from error
        raise DeviceError(f"vLLM cannot make its engine: {said}") from error


class VllmCore:
    """One EngineCore."""

    def __init__(
        self,
        engine: Any,
        scheduling: SchedulerSettings,
        kv: KvHome,
        stepper: Stepper,
        leader: Leader,
        *,
        native: bool,
    ) -> None:
        self.engine, self.scheduling, self._native, self._stepper = engine, scheduling, native, stepper
        self._leader = leader
        self._scheduler = engine.scheduler
        self._vault = engine.scheduler.vault
        self._scheduler.on_planned = self._planned
        self._block_tokens = kv.block_tokens
        self.room = Room(kv.stream_blocks_max(scheduling.context_tokens_max), kv.block_tokens)
        self._pool: Pool | None = None
        self._resumes = Resumes()
        self._asked = self._arrived = 0
        self._line: list[tuple[int, int, Any, GenerateRequest]] = []  # those who wait for a place, the next one first
        stepper.after_step = self._after_step

    def __repr__(self) -> str:
        return repr(self._vault)

    @property
    def books(self) -> AbstractContextManager[object]:
        books: AbstractContextManager[object] = self._vault.books
        return books

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    def use(self) -> KvUse:
        use: KvUse = self._vault.use()
        return use

    def name_blocks(self, root: bytes) -> None:
        """What a block is called, from now on; before the first request."""
        if self.engine.request_block_hasher is None:
            raise UserError("this vLLM names no blocks; it cannot be served, but with --kv direct")
        self.engine.request_block_hasher = namer(root, self._block_tokens)

    # -- requests

    def attach(self, pool: Pool, resumes: Resumes) -> None:
        with self.books:
            self._leader.note(pool)
            self._vault.attach(pool)
            self._pool, self._resumes = pool, resumes

    def add(self, made: Any, asked: GenerateRequest) -> None:
        """Give vLLM a request, or have it wait here: vLLM has one place more than streams may have, a canary's."""
        self._arrived += 1
        self._stepper.meets(asked.sampling)
        heapq.heappush(self._line, (made.priority, self._arrived, made, asked))
        self._admit()

    def add_alone(self, made: Any, asked: GenerateRequest) -> None:
        """As `add`; its steps are its own, in turn with the others'."""
        self._scheduler.alone = made.request_id
        self.add(made, asked)

    def _after_step(self) -> None:
        self._leader.published()
        self._admit()

    def _admit(self) -> None:
        """As many of those who wait as there are places for."""
        requests = self._scheduler.requests
        streams = sum(request.priority >= 0 for request in requests.values()) if self._line else 0
        while self._line and (self._line[0][0] < 0 or streams < self.scheduling.concurrency):
            priority, _, made, asked = heapq.heappop(self._line)
            streams += priority >= 0
            self._give(made, asked)

    def _give(self, made: Any, asked: GenerateRequest) -> None:
        request, _ = self.engine.preprocess_add_request(made)
        if self._native:
            bring_back(request, asked)
        if len(asked.tokens) > asked.prompt_len:
            self._count_resumed(request, len(asked.tokens))
        self.engine.add_request(request)

    def _count_resumed(self, request: Any, tokens: int) -> None:
        if self._pool is None:
            return
        with self.books:
            keys = self._scheduler.keys_of(request)
            found = self._vault.match(keys)
            self._resumes.count(self._pool, keys, found, tokens - 1 - found * self._block_tokens)

    def waits(self, name: str) -> bool:
        """Return whether a request waits here, and vLLM has not been given it. From any thread: of a line that changes
        meanwhile it may tell what was so a moment ago."""
        return any(made.request_id == name for _, _, made, _ in list(self._line))

    def abort(self, name: str) -> None:
        self._line = [each for each in self._line if each[2].request_id != name]
        heapq.heapify(self._line)
        self.engine.abort_requests([name])
        self._admit()

    def leave(self) -> None:
        """Nothing of the pool is written any more, and nobody has any of it."""
        self._line.clear()
        self.engine.abort_requests(list(self._scheduler.requests))
        self._stepper.drain()
        self._leader.rest()
        with self.books:
            self._vault.detach()
            self._pool = None
            self._leader.forget()

    def close(self) -> None:
        """No step after this; nothing of vLLM's is left in this process but its modules."""
        self._stepper.serve(None)
        self.engine.shutdown()
        cleanup_dist_env_and_memory()

    def answer(self, number: int, request: GenerateRequest, dropped: Callable[[], bool] = lambda: False) -> Answer:
        """Return what it says to a question, alone, while it stands by. Raise Dropped if `dropped` says so, which is
        asked between two steps."""
        self._asked += 1
        end = request.prompt_len + request.sampling.max_tokens
        name = f"canary-{self._asked}"
        made = engine_request(name, 0, request, self.scheduling, end=end, native=self._native)
        order = Order(name, 0, canary=True, top_logprobs=request.sampling.top_logprobs)
        self.add(made, request)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while self._stepper.has_work():
            if dropped():
                self.abort(name)
                self._stepper.drain()
                self._leader.rest()
                raise Dropped
            for each in self._stepper.step():
                output = output_of(each, order)
                tokens += output.tokens
                logprobs += output.logprobs or ()
        self._leader.rest()
        if not tokens:
            raise UserError("vLLM makes no token")
        return Answer(number, request, tuple(tokens), tuple(logprobs))

    def _planned(self, output: Any) -> None:
        self._stepper.planned(output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        if self._native:
            note_found(self._scheduler, output)
