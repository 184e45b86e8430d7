"""Hosts stock vLLM in a vault's memory: vLLM's engine lives in this process, in the step thread.

vLLM starts no other process: its frontend, engine and worker are in this one, so no part of it can be killed, stopped
or left behind alone. Requests and outputs pass between threads as objects.

Always true:
- Before `begin` vLLM writes only scratch memory and this engine's private blocks. It warms up on scratch, at the
  addresses that it will use later.
- Blocks that a step completed are published before its outputs leave the step thread.
- Nothing is output for a cancelled stream.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from holdfast import __version__
from holdfast.core.errors import Code, HoldfastError, Refused, UserError
from holdfast.core.requests import GenerateRequest, TokenLogprobs
from holdfast.engines.contract import Capabilities, Limits, Progress
from holdfast.engines.host.answers import answers_in, known_answer
from holdfast.engines.host.engine import VaultEngine
from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.host.pool import Owned
from holdfast.engines.host.proving import TOLERANCE_NATS, Canary
from holdfast.engines.host.step_thread import SteppedEngine
from holdfast.engines.paged.canary import Dropped
from holdfast.engines.paged.scheduler import SchedulerSettings
from holdfast.engines.ranks.leader import RankProcesses
from holdfast.engines.vllm.canary import AnsweredQuestion, clearest
from holdfast.engines.vllm.hollow import Scratch, ScratchMemory
from holdfast.engines.vllm.hooks import installed
from holdfast.engines.vllm.kv_home import KvHome
from holdfast.engines.vllm.options import engine_config, loaded_as
from holdfast.engines.vllm.ranks.leader import VllmLeader
from holdfast.engines.vllm.requests import OpenRequest, OpenRequests, engine_request, output_of
from holdfast.engines.vllm.sampling import bring_back, note_found, take_over
from holdfast.engines.vllm.scheduler import namer
from holdfast.engines.vllm.stepper import VllmStepThread
from holdfast.engines.vllm.weights import ModelBuild, VllmWeights
from holdfast.engines.vllm.worker import WorkerParts, making_worker, parts_being_made
from holdfast.kv.pool import KvUse, Pool, Resumes
from holdfast.memory.client.pool import Home, PoolMapping
from holdfast.memory.devices.contract import DeviceError
from holdfast.memory.torch.arithmetic import arithmetic
from holdfast.memory.torch.tensors import dtype_name, torch_device
from holdfast.spec.engines import FailoverSettings, VllmSettings

# vLLM's message when its KV cache is too small for one text of the context's length, with its advice.
NO_ROOM = ("No available memory for the cache blocks", "larger than the available KV cache memory")
ITS_MENDS = " Try increasing"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    count: int
    block_tokens: int


class LeadingExecutor(UniProcExecutor):
    """vLLM's executor for one process, which sends every call to the other ranks too. Rank 0's worker is in this
    process. Calls that make tokens return rank 0's answer; all other calls wait for every rank."""

    def _init_executor(self) -> None:
        leader = parts_being_made().leader
        assert leader is not None, "an engine of one rank has vLLM's own executor"
        self._leader = leader
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._leader.meeting, 0, 0

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        assert isinstance(method, str), f"{method} cannot be sent to another process"
        assert single_value or not non_block, f"{method} of all ranks is waited for"
        self._leader.call(method, args, kwargs or {}, answered=not single_value)
        mine = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        return mine if single_value else [*mine, *self._leader.results()]


def make_core(
    config: Any,
    parts: WorkerParts,
    scheduling: SchedulerSettings,
    stepper: VllmStepThread,
    leader: VllmLeader,
    *,
    native: bool,
) -> VllmCore:
    """Return vLLM's engine, loaded and warmed up. Called in the step thread."""
    executor = UniProcExecutor if leader.count == 1 else LeadingExecutor
    with making_worker(parts), vllm_errors():
        engine = EngineCore(config, executor, log_stats=False)
    leader.met()
    return VllmCore(engine, scheduling, parts.kv, stepper, leader, native=native)


@contextmanager
def vllm_errors() -> Iterator[None]:
    """Turn any error that vLLM raises while it makes its engine into one sentence."""
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
    """vLLM's EngineCore and Holdfast's state beside it, in the step thread.

    Always true: all methods but `attach`, `use` and `running` are called in the step thread. The blocks found for a
    resumed request are counted before vLLM looks for them.
    """

    def __init__(
        self,
        engine: Any,
        scheduling: SchedulerSettings,
        kv: KvHome,
        stepper: VllmStepThread,
        leader: VllmLeader,
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
        # requests that wait for a slot, the next one first
        self._line: list[tuple[int, int, Any, GenerateRequest]] = []
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
        if self.engine.request_block_hasher is None:
            raise UserError("this vLLM names no blocks; it cannot be served, but with --kv direct")
        self.engine.request_block_hasher = namer(root, self._block_tokens)

    # -- requests

    def attach(self, pool: Pool, resumes: Resumes) -> None:
        with self.books:
            self._leader.record(pool)
            self._vault.attach(pool)
            self._pool, self._resumes = pool, resumes

    def add(self, made: Any, asked: GenerateRequest, *, alone: bool = False) -> None:
        """Give vLLM a request, or queue it here: vLLM has one slot more than the streams, for a canary. `alone`: it
        runs in separate steps, which alternate with the others'."""
        if alone:
            self._scheduler.alone = made.request_id
        self._arrived += 1
        self._stepper.note_request(asked.sampling)
        heapq.heappush(self._line, (made.priority, self._arrived, made, asked))
        self._admit()

    def _after_step(self) -> None:
        if self._leader.has_published:
            self._leader.sync(drained=False)
        self._admit()

    def _admit(self) -> None:
        """Give vLLM as many waiting requests as it has slots for."""
        requests = self._scheduler.requests
        streams = sum(request.priority >= 0 for request in requests.values()) if self._line else 0
        while self._line and (self._line[0][0] < 0 or streams < self.scheduling.concurrency):
            priority, _, made, asked = heapq.heappop(self._line)
            streams += priority >= 0
            request, _ = self.engine.preprocess_add_request(made)
            if self._native:
                bring_back(request, asked)
            if len(asked.tokens) > asked.prompt_len and self._pool is not None:
                self._count_resumed(self._pool, request, len(asked.tokens))
            self.engine.add_request(request)

    def _count_resumed(self, pool: Pool, request: Any, tokens: int) -> None:
        with self.books:
            keys = self._scheduler.keys_of(request)
            found = self._vault.match(keys)
            self._resumes.count(pool, keys, found, tokens - 1 - found * self._block_tokens)

    def waits(self, name: str) -> bool:
        """Return True if a request waits here and vLLM does not have it yet. Callable from any thread; the answer may
        be outdated at once."""
        return any(made.request_id == name for _, _, made, _ in list(self._line))

    def abort(self, name: str) -> None:
        self._line = [each for each in self._line if each[2].request_id != name]
        heapq.heapify(self._line)
        self.engine.abort_requests([name])
        self._admit()

    def leave(self) -> None:
        """Return when no step writes the pool any more, and no request holds its blocks."""
        self._line.clear()
        self.engine.abort_requests(list(self._scheduler.requests))
        self._stepper.drain()
        self._leader.sync(drained=True)
        with self.books:
            self._vault.detach()
            self._pool = None
            self._leader.end_record()

    def close(self) -> None:
        """End all steps; leave nothing of vLLM in this process but its modules."""
        self._stepper.serve(None)
        self.engine.shutdown()
        cleanup_dist_env_and_memory()

    def answer(
        self, number: int, request: GenerateRequest, dropped: Callable[[], bool] = lambda: False
    ) -> AnsweredQuestion:
        """Return the answer to a question, run alone in a standby. Raise Dropped if `dropped()` is true between two
        steps."""
        self._asked += 1
        end = request.prompt_len + request.sampling.max_tokens
        name = f"canary-{self._asked}"
        made = engine_request(name, 0, request, self.scheduling, end=end, native=self._native)
        order = OpenRequest(name, 0, canary=True, top_logprobs=request.sampling.top_logprobs)
        self.add(made, request)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while self._stepper.has_work():
            if dropped():
                self.abort(name)
                self._stepper.drain()
                self._leader.sync(drained=True)
                raise Dropped
            for each in self._stepper.step():
                output = output_of(each, order)
                tokens += output.tokens
                logprobs += output.logprobs or ()
        self._leader.sync(drained=True)
        if not tokens:
            raise UserError("vLLM makes no token")
        return AnsweredQuestion(number, request, tuple(tokens), tuple(logprobs))

    def _planned(self, output: Any) -> None:
        self._stepper.planned(output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        if self._native:
            note_found(self._scheduler, output)


BLOCK_TOKENS = 16  # vLLM's default on a GPU


class VllmEngine(SteppedEngine):
    """The hosted engine of vLLM: `load`, `prepare`, then any number of (`begin`, `end`)."""

    _stepper: VllmStepThread
    private_bytes = 0  # its private blocks lie among the pool's

    def __init__(
        self,
        path: str,
        identity: str,
        eos_token_ids: frozenset[int],
        settings: VllmSettings,
        failover: FailoverSettings,
    ) -> None:
        self.settings = settings.for_device(not failover.device.startswith("host"))
        self.config = engine_config(path, settings, failover)
        self._native = take_over(self.config)
        self._device = torch_device(failover.device)
        self._build = ModelBuild()
        self._leader = VllmLeader(failover)
        ranks = self.config.parallel_config.tensor_parallel_size
        if ranks != self._leader.count:
            there = f"there are vaults for {self._leader.count}"
            raise ValueError(f"--tensor-parallel-size is {ranks}, but {there}; give each rank its own")
        self._loaded_as = loaded_as(identity, settings.options)
        own = loaded_as(identity, settings.options, rank=0 if self._leader.count > 1 else None)
        self.weights: VllmWeights = VllmWeights(own, self._device, self._build)
        self._path, self._identity = path, identity
        self._eos_token_ids, self._failover = eos_token_ids, failover
        self._answers = answers_in(Path(failover.vault_socket).parent)
        self._stepper = VllmStepThread(self._deliver, self._step_failed)
        self._core: VllmCore | None = None
        self._orders: OpenRequests | None = None  # while it serves
        self._canary: Canary | None = None  # chosen by the first check
        self._number = 0  # of the canary's question
        self._keeping_up = True
        self._resumes = Resumes()
        self.home: Home | None = None

    def __repr__(self) -> str:
        return f"vLLM {self._core!r}"

    # -- what it is

    @property
    def context_tokens_max(self) -> int:
        return int(self.config.model_config.max_model_len)

    @property
    def block_tokens(self) -> int:
        return int(self.config.cache_config.block_size or BLOCK_TOKENS)

    @property
    def dtype(self) -> str:
        return dtype_name(self.config.model_config.dtype)

    @property
    def limits(self) -> Limits:
        return Limits(self.settings.concurrency, self.settings.queue, self.context_tokens_max)

    @property
    def capabilities(self) -> Capabilities:
        is_gpu = self._device.type == "cuda"
        return Capabilities(
            deterministic=False,
            build=f"vllm {installed()}",
            dtype=self.dtype,
            device=torch.cuda.get_device_name(self._device) if is_gpu else "cpu",
            vocabulary=int(self.config.model_config.get_vocab_size()),
        )

    @property
    def canary(self) -> Canary:
        assert self._canary is not None, "it is chosen by the first check"
        return self._canary

    @property
    def resumes(self) -> Resumes:
        return self._resumes

    @property
    def books(self) -> AbstractContextManager[object]:
        return self._core.books if self._core is not None else nullcontext()

    def progress(self) -> Progress:
        core, orders = self._core, self._orders
        running = core.running if core is not None else 0
        return self._progress(
            running=running,
            waiting=max(0, len(orders) - running) if orders is not None else 0,
            kv=core.use() if core is not None and orders is not None else KvUse(),
        )

    # -- standing by

    async def prepare(self, memory: VaultMemory, ranks: RankProcesses) -> None:
        ground = ScratchMemory(memory.device, asyncio.get_running_loop())
        kv = KvHome(self._device, ground, self._failover.engine_id, self._failover.direct)
        parts = WorkerParts(self._build, Scratch(self._device, ground), kv, self._leader)
        await self._leader.start_ranks(memory, ranks, self._path, self._identity, self.settings)
        core, _ = await asyncio.gather(self._in_step_thread(lambda: self._make(parts)), ranks.load())
        self._core = core
        self.geometry = kv.geometry(self._loaded_as, ranks=self._leader.count)
        self.home = kv.home
        if not kv.direct:
            core.name_blocks(self.geometry.root())
        await ranks.order("stand_by", self._failover.load_s)

    def _make(self, parts: WorkerParts) -> VllmCore:
        try:
            made = parts, self._scheduling(), self._stepper, self._leader
            core = make_core(self.config, *made, native=self._native)
        except BaseException as error:
            self._build.fail(error)
            raise
        self._stepper.serve(core.engine)
        return core

    def _scheduling(self) -> SchedulerSettings:
        settings = self.settings
        return SchedulerSettings(
            vocabulary=int(self.config.model_config.get_vocab_size()),
            eos_token_ids=self._eos_token_ids,
            context_tokens_max=self.context_tokens_max,
            concurrency=settings.concurrency,
            queue=settings.queue,
            step_tokens_max=max(settings.concurrency + 1, 512),
        )

    async def stop(self) -> None:
        self._loop = None
        self._build.bound()  # the step thread waits for this
        core, self._core = self._core, None
        if core is not None:
            self._stepper.act(core.close)
        await asyncio.to_thread(self._stepper.stop)
        self._leader.stop()

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """Run the canary, alone, in private blocks."""
        assert self._core is not None, "it is prepared"
        core, canary, number = self._core, self._canary, self._number
        if canary is None:
            vocabulary = core.scheduling.vocabulary
            found = await self._in_step_thread(lambda: clearest(vocabulary, core.answer))
            canary, self._number = self._known(found), found.number
            self._canary = canary
        else:
            request = canary.request
            found = await self._in_step_thread(lambda: core.answer(number, request, dropped))
            if not canary.fits(found.tokens, found.logprobs):
                canary = self._canary = self._known(found)
        return "" if canary.fits(found.tokens, found.logprobs) else canary.suspects

    def _known(self, found: AnsweredQuestion) -> Canary:
        """Return the question with this machine's known answer."""
        canary = Canary(found.request, found.tokens, str(self._answers), TOLERANCE_NATS)
        made = (self.weights.identity, self.capabilities, self.settings, self._leader.count, found.number, __version__)
        kind = f"{made}, {arithmetic(self._device, torch.get_num_threads())}"

        def agrees(written: tuple[int, ...]) -> bool:
            return replace(canary, tokens=written).fits(found.tokens, found.logprobs)

        return replace(canary, tokens=known_answer(self._answers, kind, found.tokens, agrees))

    # -- awake

    async def begin(self, owned: Owned) -> None:
        assert self._core is not None, "it is prepared"
        self._resumes = Resumes()
        self._core.attach(owned.pool, self._resumes)
        self._stepper.gather()
        self._orders = OpenRequests(self._core.scheduling, self._core.room, native=self._native)

    async def end(self) -> list[int]:
        core, orders = self._core, self._orders
        assert core is not None, "it is prepared"
        self._orders = None
        await self._in_step_thread(core.leave)
        return orders.clear() if orders is not None else []

    def submit(self, stream: int, request: GenerateRequest) -> None:
        self._submit(stream, request)

    def submit_alone(self, stream: int, request: GenerateRequest) -> None:
        self._submit(stream, request, alone=True)

    def _submit(self, stream: int, request: GenerateRequest, *, alone: bool = False) -> None:
        core, orders = self._core, self._orders
        if core is None or orders is None:
            raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not awake")
        made = orders.take(stream, request)
        if made is not None:
            self._stepper.act(lambda: core.add(made, request, alone=alone))
        elif self._loop is not None:
            self._loop.call_soon(self._tell_early)

    def cancel(self, stream: int) -> None:
        core, name = self._core, self._orders.cancel(stream) if self._orders is not None else None
        if core is not None and name is not None:
            self._stepper.act(lambda: core.abort(name))

    def withdraw(self, stream: int) -> bool:
        core, name = self._core, self._orders.name_of(stream) if self._orders is not None else None
        if core is None or name is None or not core.waits(name):
            return False
        self.cancel(stream)
        return True

    # -- from the step thread

    def _deliver(self, outputs: list[Any]) -> bool:
        self._in_loop(lambda: self._hand_over(outputs))
        return self._keeping_up

    def _hand_over(self, outputs: list[Any]) -> None:
        if self._orders is not None and (told := self._orders.translate(outputs)):
            self._keeping_up = self._events.outputs(told)

    def _tell_early(self) -> None:
        if self._orders is not None and (told := self._orders.take_early()):
            self._events.outputs(told)


def vllm_engine(
    path: str, identity: str, eos_token_ids: Iterable[int], settings: VllmSettings, failover: FailoverSettings
) -> VaultEngine[VllmEngine]:
    return VaultEngine(VllmEngine(path, identity, frozenset(eos_token_ids), settings, failover), failover)
