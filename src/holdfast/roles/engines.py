"""From launch settings to an engine with its card, tokenizer and chaos socket."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from msgspec.structs import replace

from holdfast.core.errors import UserError
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.engines.contract import Engine, FailoverEngine
from holdfast.engines.sim.chaos_server import ChaosServer
from holdfast.engines.sim.computer import vault_bytes, weights_bytes
from holdfast.engines.sim.engine import SimEngine
from holdfast.engines.sim.faults import Fault, Faults
from holdfast.engines.sim.vocabulary import EOS_TOKEN_ID, LanguageVariant, chat_template, tokenizer_json
from holdfast.roles.examining import Asked, examine, examine_vllm, gpu_bytes, torch_weights_bytes, vllm_bytes
from holdfast.roles.model_names import named
from holdfast.roles.progress import Lines
from holdfast.roles.small_files import card_canaries, read_template
from holdfast.spec.engines import ENGINES, REAL
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.names import chaos_path

if TYPE_CHECKING:
    from holdfast.engines.host.engine import VaultEngine

LOG_SHARES = 10  # lines a load logs: a person who follows the log sees it move

log = logging.getLogger("holdfast.engine")


class Breakable(Protocol):
    """What takes faults on command."""

    faults: Faults

    def inject(self, fault: Fault) -> None: ...


@dataclass(frozen=True, slots=True)
class MadeEngine:
    engine: Engine
    card: ModelCard
    tokenizer: bytes
    chaos_path: Path | None
    breakable: Breakable | None = None  # what of it breaks on command

    def failover_engine(self) -> FailoverEngine:
        """The engine as one that stands by and is woken; UserError if its memory is in no vault."""
        if not self.engine.capabilities.failover:
            raise UserError("an engine can only stand by with its memory in a vault: set vault_socket")
        return cast(FailoverEngine, self.engine)

    @contextlib.asynccontextmanager
    async def chaos(
        self, reset_connections: Callable[[], None], delay_beats: Callable[[float], None]
    ) -> AsyncIterator[None]:
        """The fault socket, if the worker was started with leave to break it and its engine can be broken so."""
        if self.chaos_path is None or self.breakable is None:
            yield
            return
        self.breakable.faults.on_reset, self.breakable.faults.on_late_beats = reset_connections, delay_beats
        server = ChaosServer(str(self.chaos_path), self.breakable.inject, self.breakable.faults)
        await server.start()
        try:
            yield
        finally:
            await server.close()


def make_engine(launch: WorkerLaunch, rng: random.Random) -> MadeEngine:
    """UserError names an engine that does not exist, ValueError a field that cannot be. May take seconds."""
    if launch.engine not in ENGINES:
        raise UserError(f"unknown engine {launch.engine!r}; there is: {', '.join(ENGINES)}")
    _check(launch)
    path = chaos_path(launch.state_dir, launch.name) if launch.allow_chaos else None
    if launch.engine == "sim":
        engine, breakable, card, tokenizer = make_sim(launch, rng)
        return MadeEngine(engine, _with_canaries(launch, card, tokenizer), tokenizer, path, breakable)
    progress = Lines(log.info, LOG_SHARES, ": …")  # `starting` reads them
    make = _make_vllm if launch.engine == "vllm" else _make_torch
    engine, card, tokenizer = make(launch, progress)
    from holdfast.engines.host.flips import WeightFaults

    return MadeEngine(engine, _with_canaries(launch, card, tokenizer), tokenizer, path, WeightFaults(engine.memory))


def _with_canaries(launch: WorkerLaunch, card: ModelCard, tokenizer: bytes) -> ModelCard:
    """Return the card with the known questions that the worker was given."""
    return replace(card, canary_prompts=card_canaries(launch.canary_prompts, tokenizer, card.context_tokens_max))


def _make_torch(launch: WorkerLaunch, progress: Lines) -> tuple[VaultEngine[Any], ModelCard, bytes]:
    checkpoint = examine(Asked.of_worker(launch), progress)  # what cannot be is refused before torch is loaded
    try:
        from holdfast.roles.engine_torch import make_torch
    except ModuleNotFoundError as error:
        raise UserError(f"the torch engine needs {error.name}: pip install 'holdfast-llm[torch]'") from error
    return make_torch(launch, checkpoint, progress)


def _make_vllm(launch: WorkerLaunch, progress: Lines) -> tuple[VaultEngine[Any], ModelCard, bytes]:
    files, plan = examine_vllm(launch, progress)
    log.info("this worker's memory: %s", plan.text())
    from holdfast.roles.engine_vllm import make_vllm

    return make_vllm(launch, files, progress)


def memory_needed(launch: WorkerLaunch) -> int:
    """Bytes on each of its devices, of all engines that share them; 0: that is not known before they are loaded."""
    if launch.engine == "sim":
        return vault_bytes(launch.sim)
    if launch.engine == "vllm":
        return vllm_bytes(launch)
    source, _ = named(launch.engine, launch.source, launch.model)
    return gpu_bytes(Asked.of_worker(replace(launch, source=source)))


def weights_least(launch: WorkerLaunch) -> int:
    """Bytes that its weights take at least, of all its ranks together; 0: that is not known here."""
    if launch.engine == "sim":
        return max(0, weights_bytes(launch.sim))
    if launch.engine == "vllm":
        return 0
    source, _ = named(launch.engine, launch.source, launch.model)
    return torch_weights_bytes(Asked.of_worker(replace(launch, source=source)))


def make_sim(launch: WorkerLaunch, rng: random.Random) -> tuple[Engine, SimEngine, ModelCard, bytes]:
    """The engine, what of it breaks on command, its card and its tokenizer; ValueError names a field that cannot
    be."""
    settings, tokenizer = launch.sim, tokenizer_json(launch.sim.tokenizer)
    card = ModelCard(
        name=launch.model,
        weights=WeightsIdentity(LanguageVariant.of(settings).weights, settings.quantization),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        chat_template=read_template(launch.chat_template) if launch.chat_template else chat_template(),
        context_tokens_max=min(settings.context_tokens_max, settings.kv_blocks * settings.block_size),
        block_size=settings.block_size,
        eos_token_ids=[EOS_TOKEN_ID],
    )
    return *_sim(launch, rng), card, tokenizer


def _sim(launch: WorkerLaunch, rng: random.Random) -> tuple[Engine, SimEngine]:
    """Make a failover engine if there is a vault, else one whose memory ends with it."""
    settings = launch.sim
    if not launch.failover.vault_socket:
        if settings.ranks > 1:
            raise ValueError(f"ranks must be 1 without a vault, got {settings.ranks}; set vault_socket")
        engine = SimEngine(settings, rng)
        return engine, engine
    from holdfast.engines.sim.hosted import VaultSim  # loads numpy

    made = VaultSim(settings, rng, launch.engine_failover())
    return made, made.hosted


def _check(launch: WorkerLaunch) -> None:
    """What each of the settings allows and together cannot be."""
    vault_socket = launch.failover.vault_socket
    if launch.engine in REAL and not vault_socket:
        keeps = f"a {launch.engine} engine keeps its memory in a vault"
        raise ValueError(f"vault_socket: {keeps}; set it, or use `holdfast up`")
    if launch.lock and not vault_socket:
        raise ValueError("lock: an engine can only stand by with its memory in a vault; set vault_socket")
    if vault_socket and not launch.lock:
        raise ValueError("vault_socket: an engine with its memory in a vault waits to be elected; set lock")
