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
from holdfast.engines.sim import EOS_TOKEN_ID, ChaosServer, SimEngine, SimSettings, chat_template, tokenizer_json

ENGINES = ("sim",)


@dataclass(frozen=True, slots=True)
class MadeEngine:
    engine: SimEngine
    card: ModelCard
    tokenizer: bytes
    chaos_path: Path | None

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
    """UserError names an engine that does not exist."""
    if launch.engine not in ENGINES:
        raise UserError(f"unknown engine {launch.engine!r}; there is: {', '.join(ENGINES)}")
    settings = SimSettings(**msgspec.to_builtins(launch.sim))
    tokenizer = tokenizer_json()
    card = ModelCard(
        name=launch.model,
        weights=WeightsIdentity(revision="sim-language-1"),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        chat_template=chat_template(),
        context_tokens_max=settings.context_tokens_max,
        block_size=settings.block_size,
        eos_token_ids=[EOS_TOKEN_ID],
    )
    path = chaos_path(launch.state_dir, launch.name) if launch.allow_chaos else None
    return MadeEngine(SimEngine(settings, rng), card, tokenizer, path)
