"""The torch engine from its launch settings. Imported only for it: torch takes seconds to load."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.engines.host.engine import VaultEngine
from holdfast.engines.torch.engine import TorchEngine, torch_engine
from holdfast.engines.torch.files.checkpoint import Checkpoint, OnProgress
from holdfast.engines.torch.files.resolve import with_identity
from holdfast.engines.torch.geometry import settings_on, with_planned_pool
from holdfast.roles.small_files import chat_template
from holdfast.spec.engines import TorchSettings
from holdfast.spec.launch import WorkerLaunch

log = logging.getLogger("holdfast.engine")


def make_torch(
    launch: WorkerLaunch, looked_at: Checkpoint, progress: OnProgress
) -> tuple[VaultEngine[TorchEngine], ModelCard, bytes]:
    """The engine, its card and its tokenizer; UserError for a model that cannot be had, ValueError for a field."""
    checkpoint = with_identity(looked_at, Path(launch.cache_dir), progress)
    settings = _settings(launch, checkpoint)
    engine = torch_engine(checkpoint, settings, launch.engine_failover(), progress)
    template = chat_template(launch, checkpoint)
    card = ModelCard(
        name=launch.model,
        weights=WeightsIdentity(revision=checkpoint.identity, dtype=engine.hosted.geometry.dtype),
        tokenizer_sha256=hashlib.sha256(checkpoint.tokenizer_json).hexdigest(),
        chat_template=template,
        context_tokens_max=engine.hosted.context_tokens_max,
        block_size=settings.block_tokens,
        eos_token_ids=list(checkpoint.config.eos_token_ids),
        generation_defaults=dict(checkpoint.generation_defaults),
        model_type="chat" if template else "completions",
        root=launch.source if Path(launch.source).is_absolute() else "",
    )
    return engine, card, checkpoint.tokenizer_json


def _settings(launch: WorkerLaunch, checkpoint: Checkpoint) -> TorchSettings:
    """What was asked for on the devices it is for; a GPU's memory plan is told first, then kept or refused."""
    devices = [launch.failover.device, *(device for _, device in launch.failover.more_vaults)]
    if launch.torch.ranks != len(devices):
        raise ValueError(f"more_vaults: {launch.torch.ranks} ranks need as many devices, got {len(devices)}")
    settings, plan = settings_on(devices, checkpoint, launch.torch, launch.standbys, launch.device_pairs)
    for line in plan.lines() if plan is not None else ():
        log.info("memory of %s: %s", launch.failover.device, line)
    return with_planned_pool(settings, plan)
