"""From launch settings to an engine with its card, tokenizer and chaos socket."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from holdfast.cli.engine_sim import make_sim
from holdfast.cli.examining import Asked, examine
from holdfast.cli.launch import ENGINES, WorkerLaunch
from holdfast.cli.progress import Lines
from holdfast.core.errors import UserError
from holdfast.discovery.card import ModelCard
from holdfast.engines.contract import Engine, ShadowEngine
from holdfast.engines.sim import ChaosServer, SimEngine

LOG_SHARES = 10  # lines a load logs: a person who follows the log sees it move
STANDBYS = ("mapped", "unmapped")
KV = ("vault", "direct")

log = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class MadeEngine:
    engine: Engine
    card: ModelCard
    tokenizer: bytes
    chaos_path: Path | None
    breakable: SimEngine | None = None  # what of it breaks on command

    def shadow(self) -> ShadowEngine:
        """The engine as one that stands by and is woken; UserError if its memory is in no vault."""
        if not self.engine.capabilities.shadow:
            raise UserError("an engine can only stand by with its memory in a vault: set vault_socket")
        return cast(ShadowEngine, self.engine)

    @contextlib.asynccontextmanager
    async def chaos(self, reset_connections: Callable[[], None]) -> AsyncIterator[None]:
        """The fault socket, if the worker was started with leave to break it and its engine can be broken so."""
        if self.chaos_path is None or self.breakable is None:
            yield
            return
        self.breakable.faults.on_reset = reset_connections
        server = ChaosServer(str(self.chaos_path), self.breakable.inject, self.breakable.faults)
        await server.start()
        try:
            yield
        finally:
            await server.close()


def chaos_path(state_dir: str, name: str) -> Path:
    return Path(state_dir) / "run" / f"{name}.chaos"


def make_engine(launch: WorkerLaunch, rng: random.Random) -> MadeEngine:
    """UserError names an engine that does not exist, ValueError a field that cannot be. May take seconds."""
    if launch.engine not in ENGINES:
        raise UserError(f"unknown engine {launch.engine!r}; there is: {', '.join(ENGINES)}")
    _check(launch)
    path = chaos_path(launch.state_dir, launch.name) if launch.allow_chaos else None
    if launch.engine == "sim":
        engine, breakable, card, tokenizer = make_sim(launch, rng)
        return MadeEngine(engine, card, tokenizer, path, breakable)
    progress = Lines(log.info, LOG_SHARES, ": …")  # `starting` reads them
    checkpoint = examine(Asked.of_worker(launch), progress)  # what cannot be is refused before torch is loaded
    try:
        from holdfast.cli.engine_torch import make_torch
    except ModuleNotFoundError as error:
        raise UserError(f"the torch engine needs {error.name}: pip install 'holdfast-llm[torch]'") from error
    return MadeEngine(*make_torch(launch, checkpoint, progress), path)


def _check(launch: WorkerLaunch) -> None:
    for name, value, choices in (("standby", launch.standby, STANDBYS), ("kv", launch.kv, KV)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    if not launch.wake_s > 0:
        raise ValueError(f"wake_s must be over 0, got {launch.wake_s}")
    if not launch.load_s > 0:
        raise ValueError(f"load_s must be over 0, got {launch.load_s}")
    if launch.engine == "torch" and not launch.vault_socket:
        raise ValueError("vault_socket: a torch engine keeps its memory in a vault; set it, or use `holdfast up`")
    if launch.lock and not launch.vault_socket:
        raise ValueError("lock: an engine can only stand by with its memory in a vault; set vault_socket")
    if launch.vault_socket and not launch.lock:
        raise ValueError("vault_socket: an engine with its memory in a vault waits to be elected; set lock")
