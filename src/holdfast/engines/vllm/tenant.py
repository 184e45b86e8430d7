"""Stock vLLM as a tenant of a vault's memory: its engine lives in this process, in the step thread.

There is no process of vLLM's own: front, engine and worker are one, so nothing of it can be killed, stopped or left
behind apart from the rest. Requests and outputs cross from thread to thread as objects.

Always true: before `begin` only this engine's private blocks are written, or scratch; vLLM warms up on scratch, at the
addresses that stay; what a step completed is published before its outputs leave the step thread; nothing is said of a
stream that was cancelled.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast import __version__
from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.contract import Capabilities, EngineEvents, Limits, Progress, p99_ms
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.engines.shadow.answers import answers_in, known_answer
from holdfast.engines.shadow.engine import Tenant, VaultEngine
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.pool import Owned
from holdfast.engines.shadow.proving import TOLERANCE_NATS, Canary
from holdfast.engines.shadow.ranks import Ranks
from holdfast.engines.vllm.canary import Answer, clearest
from holdfast.engines.vllm.core import VllmCore, make_core
from holdfast.engines.vllm.ground import Ground
from holdfast.engines.vllm.hollow import Scratch
from holdfast.engines.vllm.hooks import installed
from holdfast.engines.vllm.kv_home import KvHome
from holdfast.engines.vllm.options import engine_config, loaded_as
from holdfast.engines.vllm.ranks.leader import Leader
from holdfast.engines.vllm.requests import Orders
from holdfast.engines.vllm.sampling import take_over
from holdfast.engines.vllm.stepper import Stepper
from holdfast.engines.vllm.weights import ModelBuild, VllmWeights
from holdfast.engines.vllm.worker import Rooms
from holdfast.kv.pool import KvUse
from holdfast.kv.resumes import Resumes
from holdfast.memory.client.pool_mapping import Home, PoolMapping
from holdfast.memory.torch.arithmetic import arithmetic
from holdfast.memory.torch.tensors import dtype_name, torch_device
from holdfast.spec.engines import Place, VllmSettings

# The event loop must get its turn while the step thread runs Python between two products.
SWITCH_INTERVAL_S = 0.0005
BLOCK_TOKENS = 16  # what vLLM takes on a GPU where nobody says otherwise

T = TypeVar("T")


class VllmTenant(Tenant):
    """`load`, `settle`, then any number of (`begin`, `end`)."""

    private_bytes = 0  # its private blocks lie among the pool's

    def __init__(
        self, path: str, identity: str, eos_token_ids: frozenset[int], settings: VllmSettings, place: Place
    ) -> None:
        self.settings = settings.for_device(not place.device.startswith("host"))
        self.config = engine_config(path, settings, place)
        self._native = take_over(self.config)
        self._device = torch_device(place.device)
        self._build = ModelBuild()
        self._leader = Leader(place)
        ranks = self.config.parallel_config.tensor_parallel_size
        if ranks != self._leader.count:
            there = f"there are vaults for {self._leader.count}"
            raise ValueError(f"--tensor-parallel-size is {ranks}, but {there}; give each rank its own")
        self._loaded_as = loaded_as(identity, settings.options)
        own = loaded_as(identity, settings.options, rank=0 if self._leader.count > 1 else None)
        self.weights: VllmWeights = VllmWeights(own, self._device, self._build)
        self._path, self._identity = path, identity
        self._eos_token_ids, self._place = eos_token_ids, place
        self._answers = answers_in(Path(place.vault_socket).parent)
        self._stepper = Stepper(self._deliver, self._step_failed)
        self._core: VllmCore | None = None
        self._orders: Orders | None = None  # while it serves
        self._canary: Canary | None = None  # chosen by the first check
        self._number = 0  # of its question
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: EngineEvents
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
        model = self.config.model_config
        device = "cpu"
        if self._device.type == "cuda":
            device = torch.cuda.get_device_name(self._device)
        return Capabilities(
            deterministic=False,
            build=f"vllm {installed()}",
            dtype=self.dtype,
            device=device,
            vocabulary=int(model.get_vocab_size()),
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
        stepper, core = self._stepper, self._core
        budget_ms = stepper.budget_ms  # before `steps`: see there
        running = core.running if core is not None else 0
        return Progress(
            steps=stepper.steps,
            running=running,
            waiting=max(0, len(self._orders) - running) if self._orders is not None else 0,
            step_ms_p99=p99_ms(stepper.recent_s),
            budget_ms=budget_ms,
            thread=(os.getpid(), stepper.thread) if stepper.thread else None,
            kv=core.use() if core is not None and self._orders is not None else KvUse(),
        )

    def ping(self, answer: Callable[[], None]) -> None:
        self._stepper.ping(lambda: self._in_loop(answer))

    # -- standing by

    async def load(self, events: EngineEvents) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop, self._events = asyncio.get_running_loop(), events
        self._stepper.start()

    async def settle(self, memory: VaultMemory, ranks: Ranks) -> None:
        ground = Ground(memory.device, asyncio.get_running_loop())
        kv = KvHome(self._device, ground, self._place.engine_id, self._place.direct)
        rooms = Rooms(self._build, Scratch(self._device, ground), kv, self._leader)
        await self._leader.seat(memory, ranks, self._path, self._identity, self.settings)
        core, _ = await asyncio.gather(self._in_step_thread(lambda: self._make(rooms)), ranks.load())
        self._core = core
        self.geometry = kv.geometry(self._loaded_as, ranks=self._leader.count)
        self.home = kv.home
        if not kv.direct:
            core.name_blocks(self.geometry.root())
        await ranks.order("settle", self._place.load_s)

    def _make(self, rooms: Rooms) -> VllmCore:
        try:
            made = rooms, self._scheduling(), self._stepper, self._leader
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
        self._build.bound()  # whoever waits there waits no more
        core, self._core = self._core, None
        if core is not None:
            self._stepper.act(core.close)
        await asyncio.to_thread(self._stepper.stop)
        self._leader.stop()

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """The canary, alone, in private blocks."""
        assert self._core is not None, "it is settled"
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

    def _known(self, found: Answer) -> Canary:
        """The question with the answer that counts on this machine."""
        canary = Canary(found.request, found.tokens, str(self._answers), TOLERANCE_NATS)
        made = (self.weights.identity, self.capabilities, self.settings, self._leader.count, found.number, __version__)
        kind = f"{made}, {arithmetic(self._device, torch.get_num_threads())}"

        def agrees(written: tuple[int, ...]) -> bool:
            return replace(canary, tokens=written).fits(found.tokens, found.logprobs)

        return replace(canary, tokens=known_answer(self._answers, kind, found.tokens, agrees))

    async def _in_step_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._stepper.run(work))

    # -- awake

    async def begin(self, owned: Owned) -> None:
        assert self._core is not None, "it is settled"
        self._resumes = Resumes()
        self._core.attach(owned.pool, self._resumes)
        self._stepper.gather()
        self._orders = Orders(self._core.scheduling, self._core.room, native=self._native)

    async def end(self) -> list[int]:
        core, orders = self._core, self._orders
        assert core is not None, "it is settled"
        self._orders = None
        await self._in_step_thread(core.leave)
        return orders.clear() if orders is not None else []

    def submit(self, stream: int, request: GenerateRequest) -> None:
        core, orders = self._core, self._orders
        if core is None or orders is None:
            raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not awake")
        made = orders.take(stream, request)
        if made is not None:
            self._stepper.act(lambda: core.add(made, request))
        elif self._loop is not None:
            self._loop.call_soon(self._tell_early)

    def submit_alone(self, stream: int, request: GenerateRequest) -> None:
        core, orders = self._core, self._orders
        if core is None or orders is None:
            raise HoldfastError(Code.ENGINE_SHUTDOWN, "the engine is not awake")
        made = orders.take(stream, request)
        self._stepper.act(lambda: core.add_alone(made, request))

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

    def room(self) -> None:
        self._stepper.act(lambda: None)

    # -- from the step thread

    def _in_loop(self, act: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(act)

    def _deliver(self, outputs: list[Any]) -> bool:
        self._in_loop(lambda: self._hand_over(outputs))
        return self._keeping_up

    def _hand_over(self, outputs: list[Any]) -> None:
        if self._orders is not None and (told := self._orders.told(outputs)):
            self._keeping_up = self._events.outputs(told)

    def _tell_early(self) -> None:
        if self._orders is not None and (told := self._orders.take_early()):
            self._events.outputs(told)

    def _step_failed(self, why: str) -> None:
        self._events.fatal(f"a step failed: {why}")


def vllm_engine(
    path: str, identity: str, eos_token_ids: Iterable[int], settings: VllmSettings, place: Place
) -> VaultEngine[VllmTenant]:
    return VaultEngine(VllmTenant(path, identity, frozenset(eos_token_ids), settings, place), place)
