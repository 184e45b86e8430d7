"""Stock vLLM as an engine, from its launch settings. Imported only for it: vLLM takes seconds to load.

Always true: vLLM is imported after its environment was set, and after all was looked at that can be without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import UserError
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.engines.vllm.environment import needed, usual
from holdfast.roles.small_files import chat_template
from holdfast.spec.names import is_host

if TYPE_CHECKING:
    from holdfast.engines.host.engine import VaultEngine
    from holdfast.engines.torch.files.checkpoint import OnProgress
    from holdfast.engines.vllm.files import ModelFiles
    from holdfast.spec.launch import WorkerLaunch


def make_vllm(
    launch: WorkerLaunch, looked_at: ModelFiles, progress: OnProgress
) -> tuple[VaultEngine[Any], ModelCard, bytes]:
    """The engine, its card and its tokenizer; UserError for what cannot be had, ValueError for a field."""
    devices = [launch.failover.device, *(device for _, device in launch.failover.more_vaults)]
    if launch.vllm.ranks != len(devices):
        ranks = f"--tensor-parallel-size {launch.vllm.ranks}"
        raise ValueError(f"more_vaults: {ranks} needs as many devices, got {len(devices)}")
    files = looked_at.identified(Path(launch.cache_dir), progress)
    settings = launch.vllm.for_device(not is_host(launch.failover.device))
    set_environment(devices, launch.log_level)
    try:
        from holdfast.engines.vllm.hooks import check_installed

        check_installed()
        from holdfast.engines.vllm.engine import VllmEngine, vllm_engine
    except (ImportError, OSError, RuntimeError) as error:  # a library of its own that does not fit is any of these
        raise UserError(f"vLLM cannot be loaded here: {error}; see `python -c 'import vllm'`") from error
    where = str(files.path), files.identity, files.eos_token_ids
    engine: VaultEngine[VllmEngine] = vllm_engine(*where, settings, launch.engine_failover())
    template = chat_template(launch, files.text)
    card = ModelCard(
        name=launch.model,
        weights=WeightsIdentity(revision=files.identity, dtype=engine.hosted.dtype),
        tokenizer_sha256=hashlib.sha256(files.text.tokenizer_json).hexdigest(),
        chat_template=template,
        context_tokens_max=engine.limits.context_tokens_max,
        block_size=engine.hosted.block_tokens,
        eos_token_ids=files.eos_token_ids,
        generation_defaults=dict(files.text.generation_defaults),
        model_type="chat" if template else "completions",
        root=launch.source if Path(launch.source).is_absolute() else "",
    )
    return engine, card, files.text.tokenizer_json


def set_environment(devices: Sequence[str], log_level: str) -> None:
    """For this whole process, which is one engine's, and for its further ranks'."""
    for name, value in usual(devices[0], os.cpu_count() or 1, log_level, len(devices)).items():
        os.environ.setdefault(name, value)
    must = needed(*devices)
    os.environ.update({name: value for name, value in must.items() if value is not None})
    for name in (name for name, value in must.items() if value is None):
        os.environ.pop(name, None)
