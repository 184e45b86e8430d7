"""From launch settings to an engine with its card, tokenizer and chaos socket."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.cli.launch import WorkerLaunch
from holdfast.core.errors import UserError
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.engines.contract import ShadowEngine
from holdfast.engines.sim import (
    EOS_TOKEN_ID,
    REVISION,
    ChaosServer,
    SimEngine,
    SimSettings,
    chat_template,
    tokenizer_json,
)

ENGINES = ("sim",)
STANDBYS = ("mapped", "unmapped")
KV = ("vault", "direct")


@dataclass(frozen=True, slots=True)
class MadeEngine:
    engine: SimEngine
    card: ModelCard
    tokenizer: bytes
    chaos_path: Path | None

    def shadow(self) -> ShadowEngine:
        """The engine as one that stands by and is woken; UserError if its memory is in no vault."""
        from holdfast.engines.sim.shadow import ShadowSim

        if not isinstance(self.engine, ShadowSim):
            raise UserError("an engine can only stand by with its memory in a vault: set vault_socket")
        return self.engine

    @contextlib.asynccontextmanager
    async def chaos(self, reset_connections: Callable[[], None]) -> AsyncIterator[None]:
        """The fault socket, if the worker was started with leave to break it."""
        if self.chaos_path is None:
            yield
            return
        self.engine.faults.on_reset = reset_connections
        server = ChaosServer(str(self.chaos_path), self.engine.inject, self.engine.faults)
        await server.start()
        try:
            yield
        finally:
            await server.close()


def chaos_path(state_dir: str, name: str) -> Path:
    return Path(state_dir) / "run" / f"{name}.chaos"


def make_engine(launch: WorkerLaunch, rng: random.Random) -> MadeEngine:
    """UserError names an engine that does not exist, ValueError a field that cannot be."""
    if launch.engine not in ENGINES:
        raise UserError(f"unknown engine {launch.engine!r}; there is: {', '.join(ENGINES)}")
    settings = SimSettings(**msgspec.to_builtins(launch.sim))
    tokenizer = tokenizer_json()
    card = ModelCard(
        name=launch.model,
        weights=WeightsIdentity(revision=REVISION),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        chat_template=chat_template(),
        context_tokens_max=settings.context_tokens_max,
        block_size=settings.block_size,
        eos_token_ids=[EOS_TOKEN_ID],
    )
    path = chaos_path(launch.state_dir, launch.name) if launch.allow_chaos else None
    return MadeEngine(_sim(launch, settings, rng), card, tokenizer, path)


def _sim(launch: WorkerLaunch, settings: SimSettings, rng: random.Random) -> SimEngine:
    """With a vault a shadow engine; else one whose memory ends with it."""
    for name, value, choices in (("standby", launch.standby, STANDBYS), ("kv", launch.kv, KV)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    if not launch.wake_s > 0:
        raise ValueError(f"wake_s must be over 0, got {launch.wake_s}")
    if not launch.vault_socket:
        if launch.lock:
            raise ValueError("lock: an engine can only stand by with its memory in a vault; set vault_socket")
        if settings.ranks > 1:
            raise ValueError(f"ranks must be 1 without a vault, got {settings.ranks}; set vault_socket")
        return SimEngine(settings, rng)
    if not launch.lock:
        raise ValueError("vault_socket: an engine with its memory in a vault waits to be elected; set lock")
    from holdfast.engines.sim.shadow import ShadowSettings, ShadowSim  # loads numpy

    shadow = ShadowSettings(
        launch.vault_socket,
        launch.device,
        launch.engine_id,
        who=launch.name,
        unmapped=launch.standby == "unmapped",
        direct=launch.kv == "direct",
        wake_s=launch.wake_s,
    )
    return ShadowSim(settings, rng, shadow)
