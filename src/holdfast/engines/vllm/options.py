"""Turns the words after `--` into vLLM's configuration: vLLM's own parser reads them, and Holdfast sets what is its
own.

Always true: a word that vLLM does not know, or that users may not set, is refused by name before anything is loaded.
Both engines of a pair get the same configuration, and so the same blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import logging
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs

from holdfast.core.errors import Refused
from holdfast.engines.vllm.hooks import installed
from holdfast.engines.vllm.reserved_options import PASSED, RESERVED, check_arguments, check_given, flag_of
from holdfast.spec.engines import GIB, FailoverSettings, VllmSettings
from holdfast.spec.names import is_host

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:  # an older one's place
    from vllm.utils import FlexibleArgumentParser

ROOM = "holdfast"  # our part of vLLM's additional_config
WORKER = "holdfast.engines.vllm.worker.VaultWorker"
SCHEDULER = "holdfast.engines.vllm.scheduler.VaultScheduler"
ASYNC_SCHEDULER = "holdfast.engines.vllm.scheduler.VaultAsyncScheduler"
DIRECT_SCHEDULER = "holdfast.engines.vllm.direct.DirectScheduler"
DIRECT_ASYNC_SCHEDULER = "holdfast.engines.vllm.direct.DirectAsyncScheduler"
# What a resumed stream computes again is up to a block: vLLM's own 128 on a CPU are many, and its kernels want 32s.
CPU_BLOCK_TOKENS = 32
# Of the device, that must be free when an engine starts: it is no budget where the pool's size is said, and a standby
# starts on a device that is full.
UTILISATION = 0.01

_PYDANTICS = re.compile(r"\d+ validation errors? for \w+ |Value error, |\[type=.*?\]|For further .*?$")

log = logging.getLogger("holdfast.engine")


class _Parser(FlexibleArgumentParser):
    """vLLM's, but for how it ends: its words are an error's."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"vLLM {installed()} does not take these options: {_plain(message)}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        self.error(message or "they end its parser")


@functools.cache
def _parser() -> Any:
    """Return a parser that leaves out options that are not given."""
    parser = EngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


def given(words: Sequence[str], *, direct: bool = False) -> dict[str, Any]:
    """Return what the words say, by the names of EngineArgs' fields, and nothing that they do not say. Raise Refused
    with a word that vLLM does not take, or that is ours (some only where KV is not `direct`)."""
    check_arguments(words, direct=direct)
    parser = _parser()
    try:
        said: dict[str, Any] = vars(parser.parse_args(list(words)))
    except (ValueError, TypeError, IndexError, OSError) as error:  # it reads some of them before argparse does
        parser.error(f"{_in_words(error)}, in {shlex.join(words)}")
    for name, value in said.items():
        check_given(name, value, direct=direct)
        if name not in PASSED and name not in RESERVED:
            log.warning("%s is new in vLLM %s: nobody has tried it with Holdfast", flag_of(name), installed())
    return said


def engine_args(
    model_path: str, settings: VllmSettings, failover: FailoverSettings, holdfast: Mapping[str, Any] | None = None
) -> EngineArgs:
    """Return vLLM's arguments for a model that is on this machine. `holdfast`: what our classes inside vLLM are told,
    which they find as `additional_config["holdfast"]`. Refused, or UserError, says what cannot be."""
    is_gpu = not is_host(failover.device)
    settings, said = settings.for_device(is_gpu), given(settings.options, direct=failover.direct)
    if ROOM in (more := dict(said.pop("additional_config", None) or {})):
        raise Refused(f"--additional-config has {ROOM}, which is Holdfast's own; leave it out")
    defaults: dict[str, Any] = {} if is_gpu else {"block_size": CPU_BLOCK_TOKENS}
    if not is_gpu and platform.machine() == "aarch64":  # its bf16 kernels fail at the first request there
        defaults["dtype"] = "float32"
    owned = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "max_model_len": settings.context_tokens_max or None,
        "max_num_seqs": settings.concurrency + 1,  # and a canary
        "kv_cache_memory_bytes": int(settings.kv_gib * GIB),
        "gpu_memory_utilization": UTILISATION,
        "scheduling_policy": "priority",
        "distributed_executor_backend": "uni",
        "worker_cls": WORKER,
        "disable_log_stats": True,
        "additional_config": {**more, ROOM: dict(holdfast or {})},
    }
    if not failover.direct:
        owned |= {"enable_prefix_caching": True}
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if missing := sorted(set(owned) - known):
        raise Refused(f"vLLM {installed()} has no {flag_of(missing[0])}, which Holdfast sets; use a version it knows")
    return EngineArgs(**{**defaults, **said, **owned})


def engine_config(
    model_path: str, settings: VllmSettings, failover: FailoverSettings, holdfast: Mapping[str, Any] | None = None
) -> Any:
    """Return vLLM's whole configuration (a VllmConfig), as `engine_args`. The model's config.json is read for it, no
    weight. Raise Refused with vLLM's own words for what it cannot do with this model."""
    args = engine_args(model_path, settings, failover, holdfast)
    try:
        config = args.create_engine_config()
    except (ValueError, RuntimeError, OSError) as error:
        raise Refused(f"vLLM {installed()} cannot serve this: {_in_words(error)}") from error
    backend, scheduler = config.parallel_config.distributed_executor_backend, config.scheduler_config
    assert backend == "uni", f"vLLM chose {backend}: was it imported before its environment was set (`environment`)?"
    if scheduler.scheduler_cls is not None:
        raise Refused(f"this model needs vLLM's own scheduler {scheduler.scheduler_cls}; it cannot be served")
    plain, ahead = (DIRECT_SCHEDULER, DIRECT_ASYNC_SCHEDULER) if failover.direct else (SCHEDULER, ASYNC_SCHEDULER)
    scheduler.scheduler_cls = ahead if scheduler.async_scheduling else plain  # which is settled only by now
    return config


def loaded_as(identity: str, options: Sequence[str], rank: int | None = None) -> str:
    """Return the identity of weights as vLLM holds them: of the files, and of all that decides what it makes of them.
    Options that change nothing of it change it too: that costs a load, never a wrong tensor. `rank`: of one's share of
    several."""
    made = json.dumps([identity, installed(), platform.machine(), list(options)])
    share = f", rank {rank}" if rank is not None else ""
    return f"sha256:{hashlib.sha256(made.encode()).hexdigest()}{share}"


def _in_words(error: BaseException) -> str:
    return _plain(str(error)) or type(error).__name__


def _plain(text: str) -> str:
    """Return the text in one line, without what pydantic adds for programmers."""
    return _PYDANTICS.sub("", " ".join(text.split())).strip()
