"""The sim engine from its launch settings."""

from __future__ import annotations

import hashlib
import random

import msgspec

from holdfast.cli.chat_templates import read_template
from holdfast.cli.engine_place import place_of
from holdfast.cli.launch import WorkerLaunch
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.engines.contract import Engine
from holdfast.engines.sim import EOS_TOKEN_ID, REVISION, SimEngine, SimSettings, chat_template, tokenizer_json


def make_sim(launch: WorkerLaunch, rng: random.Random) -> tuple[Engine, SimEngine, ModelCard, bytes]:
    """The engine, what of it breaks on command, its card and its tokenizer; ValueError names a field that cannot
    be."""
    settings = SimSettings(**msgspec.to_builtins(launch.sim))
    tokenizer = tokenizer_json()
    card = ModelCard(
        name=launch.model,
        weights=WeightsIdentity(revision=REVISION),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        chat_template=read_template(launch.chat_template) if launch.chat_template else chat_template(),
        context_tokens_max=min(settings.context_tokens_max, settings.kv_blocks * settings.block_size),
        block_size=settings.block_size,
        eos_token_ids=[EOS_TOKEN_ID],
    )
    return *_engine(launch, settings, rng), card, tokenizer


def _engine(launch: WorkerLaunch, settings: SimSettings, rng: random.Random) -> tuple[Engine, SimEngine]:
    """With a vault a shadow engine; else one whose memory ends with it."""
    if not launch.vault_socket:
        if settings.ranks > 1:
            raise ValueError(f"ranks must be 1 without a vault, got {settings.ranks}; set vault_socket")
        engine = SimEngine(settings, rng)
        return engine, engine
    from holdfast.engines.sim.shadow import ShadowSim  # loads numpy

    shadow = ShadowSim(settings, rng, place_of(launch))
    return shadow, shadow.tenant
