"""Checks, when an engine starts, everything this package relies on in vLLM; refuses to start and names what differs.

None of it is a public interface of vLLM, so another version may have changed it. An untested version is logged, and
serves if all checks pass.

Always true: an engine that passes both checks has one pool of full-attention blocks, each found by one hash, with no
second writer or reader.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Refused

TESTED = ("0.26.0", "0.32.0")
FULL = ("FullAttentionSpec", "MLAAttentionSpec")  # kinds of KV that are all of a text, block by block
WORDS_MAX = 4  # findings that one refusal names

log = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class Relied:
    """A name in vLLM that we rely on.

    - `takes`: the parameters that we call it with, in this order; any other must have a default. If `overridden`, vLLM
      calls our override with them, and no others are allowed.
    - `has`: fields it must have. `of`: the class it must belong to."""

    name: str  # module:object, or module:class.attribute
    takes: str | None = None
    overridden: bool = False
    has: str = ""
    of: str = ""


_CORE, _SCHEDULER = "vllm.v1.engine.core:EngineCore", "vllm.v1.core.sched.scheduler:Scheduler"
_EXECUTOR = "vllm.v1.executor.uniproc_executor:UniProcExecutor"
_POOL, _REQUEST = "vllm.v1.core.block_pool:BlockPool", "vllm.v1.request:Request"
_WORKER, _PROCESSOR = "vllm.v1.worker.gpu_worker:Worker", "vllm.v1.sample.logits_processor:LogitsProcessor"

RELIED = (
    # the engine, in our own process
    Relied(f"{_CORE}.__init__", "vllm_config executor_class log_stats"),
    Relied(f"{_CORE}._initialize_kv_caches", "vllm_config"),
    Relied(f"{_CORE}.preprocess_add_request", "request"),
    Relied(f"{_CORE}.add_request", "request"),
    Relied(f"{_CORE}.abort_requests", "request_ids"),
    Relied(f"{_CORE}.step", ""),
    Relied(f"{_CORE}.step_with_batch_queue", ""),
    Relied(f"{_CORE}.post_step", "model_executed"),
    Relied(f"{_CORE}.shutdown", ""),
    Relied(_EXECUTOR, of="vllm.v1.executor.abstract:Executor"),
    # its further ranks
    Relied(f"{_EXECUTOR}._distributed_args", "", overridden=True),
    Relied(f"{_EXECUTOR}.collective_rpc", "method timeout args kwargs non_block single_value", overridden=True),
    Relied("vllm.v1.worker.worker_base:WorkerWrapperBase.__init__", "rpc_rank global_rank"),
    Relied("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker", "all_kwargs"),
    Relied("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", ""),
    Relied("vllm.v1.serial_utils:run_method", "obj method args kwargs"),
    # requests and what comes of them
    Relied(
        "vllm.v1.engine:EngineCoreRequest",
        has="request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request "
        "cache_salt data_parallel_rank priority",
    ),
    Relied(
        "vllm.v1.engine:EngineCoreOutput",
        has="request_id new_token_ids new_logprobs finish_reason stop_reason prefill_stats",
    ),
    Relied("vllm.v1.engine:EngineCoreOutputs", has="outputs"),
    Relied(f"{_REQUEST}.append_output_token_ids", "token_ids"),
    Relied(f"{_REQUEST}.num_tokens"),
    Relied(f"{_REQUEST}.from_engine_core_request", "request block_hasher"),
    Relied(f"{_REQUEST}.update_block_hashes", ""),
    # scheduling
    Relied(f"{_SCHEDULER}.__init__", "vllm_config kv_cache_config structured_output_manager block_size"),
    Relied(f"{_SCHEDULER}.schedule", ""),
    Relied(f"{_SCHEDULER}.update_from_output", "scheduler_output model_runner_output"),
    Relied(f"{_SCHEDULER}.finish_requests", "request_ids finished_status"),
    Relied(f"{_SCHEDULER}.reset_prefix_cache", ""),
    Relied(f"{_SCHEDULER}._preempt_request", "request timestamp"),
    Relied(f"{_SCHEDULER}.has_requests", ""),
    Relied("vllm.v1.core.sched.async_scheduler:AsyncScheduler", of=_SCHEDULER),
    Relied("vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"),
    # blocks
    Relied(f"{_POOL}.get_cached_block", "block_hash kv_cache_group_ids", overridden=True),
    Relied(
        f"{_POOL}.cache_full_blocks",
        "request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id block_mask",
        overridden=True,
    ),
    Relied(f"{_POOL}.get_new_blocks", "num_blocks", overridden=True),
    Relied(f"{_POOL}.touch", "blocks", overridden=True),
    Relied(f"{_POOL}.free_blocks", "ordered_blocks", overridden=True),
    Relied(f"{_POOL}.reset_prefix_cache", "", overridden=True),
    Relied(f"{_POOL}.get_num_free_blocks", "", overridden=True),
    Relied(f"{_POOL}.get_usage", "", overridden=True),
    Relied("vllm.v1.kv_cache_interface:KVCacheConfig", has="num_blocks kv_cache_tensors kv_cache_groups"),
    Relied("vllm.v1.kv_cache_interface:KVCacheGroupSpec", has="layer_names kv_cache_spec"),
    Relied("vllm.v1.kv_cache_interface:FullAttentionSpec", has="block_size sliding_window attention_chunk_size"),
    # memory
    Relied(f"{_WORKER}.__init__", "vllm_config local_rank rank distributed_init_method is_driver_worker"),
    Relied(f"{_WORKER}._maybe_get_memory_pool_context", "tag", overridden=True),
    Relied(f"{_WORKER}.load_model", ""),
    Relied(f"{_WORKER}.determine_available_memory", ""),
    Relied(f"{_WORKER}.initialize_from_config", "kv_cache_config"),
    Relied(f"{_WORKER}.compile_or_warm_up_model", "", overridden=True),
    # draws
    Relied(f"{_PROCESSOR}.__init__", "vllm_config device is_pin_memory", overridden=True),
    Relied(f"{_PROCESSOR}.apply", "logits", overridden=True),
    Relied(f"{_PROCESSOR}.update_state", "batch_update", overridden=True),
    Relied(f"{_PROCESSOR}.is_argmax_invariant", "", overridden=True),
    Relied("vllm.v1.sample.logits_processor:BatchUpdate", has="batch_size removed added moved"),
    Relied("vllm.v1.sample.logits_processor.builtin:process_dict_updates", "req_entries batch_update new_state"),
)

# To load a CPU's worker makes torch another for good: its streams and events are none then.
RELIED_ON_CPU = (Relied("vllm.v1.worker.cpu_worker:CPUWorker", of=_WORKER),)

# All methods of a block pool in the versions we know: any other method would read bookkeeping that we do not keep.
ASKED = frozenset(
    {
        *("get_cached_block", "cache_full_blocks", "cache_partial_block", "move_block_hashes", "get_new_blocks"),
        *("touch", "free_blocks", "evict_blocks", "unpin_blocks", "reset_prefix_cache", "is_block_writable"),
        *("get_num_free_blocks", "get_usage", "take_events", "emit_cached_block_events"),
    }
)


def installed() -> str:
    """Return the installed version of vLLM; raise ModuleNotFoundError if there is none."""
    from vllm.version import __version__

    return str(__version__).partition("+")[0]


def check_installed() -> None:
    """Raise Refused with what is different in this vLLM. Imports vLLM; call it before any engine is made."""
    from vllm.platforms import current_platform

    version = installed()
    relied = (*RELIED, *RELIED_ON_CPU) if current_platform.is_cpu() else RELIED
    if version not in TESTED:
        log.warning("vLLM %s was never tried with Holdfast; tried are %s", version, " and ".join(TESTED))
    wrong = [sentence for one in relied for sentence in found_wrong(one)]
    methods = {name for name, _ in inspect.getmembers(_named(_POOL), inspect.isfunction) if not name.startswith("_")}
    wrong += [f"{_POOL}.{name} is new" for name in sorted(methods - ASKED)]
    if wrong:
        more = f"; and {len(wrong) - WORDS_MAX} more" if len(wrong) > WORDS_MAX else ""
        raise Refused(
            f"vLLM {version} is not as Holdfast needs it: {'; '.join(wrong[:WORDS_MAX])}{more}; "
            f"install one that it knows: {' or '.join(TESTED)}"
        )
    log.info("vLLM %s has all %d names that Holdfast relies on", version, len(relied))


def check_config(vllm_config: Any, kv_cache_config: Any, *, direct: bool = False) -> None:
    """Raise Refused with the parts of a configuration and its KV cache that no other engine could adopt. `direct`: KV
    is never adopted, so any kind will do."""
    if wrong := next(_wrong_config(vllm_config), ""):
        raise Refused(f"vLLM's configuration cannot be served: {wrong}")
    if not direct and (wrong := next(_wrong_cache(vllm_config.cache_config, kv_cache_config), "")):
        raise Refused(f"this model's KV cannot be taken over: {wrong}; --kv direct serves it without")


def _wrong_config(config: Any) -> Iterator[str]:
    for name in ("pipeline", "data", "prefill_context", "decode_context"):
        if (size := getattr(config.parallel_config, f"{name}_parallel_size", 1)) != 1:
            yield f"{name.replace('_', ' ')} parallel over {size}, and only tensor parallel can be"
    features = {
        "speculative_config": "speculative decoding",
        "diffusion_config": "diffusion decoding",
        "lora_config": "LoRA adapters",
        "kv_transfer_config": "a KV connector",
        "ec_transfer_config": "an encoder cache connector",
    }
    for name, what in features.items():
        if getattr(config, name, None) is not None:
            yield f"{what} is in it ({name}), which is not served"
    if getattr(getattr(config, "kv_events_config", None), "enable_kv_cache_events", False):
        yield "KV events are in it, which nobody here publishes"
    if config.model_config.runner_type != "generate" or config.model_config.is_encoder_decoder:
        yield f"{config.model_config.architecture} is no model that only generates text"


def _wrong_cache(cache: Any, found: Any) -> Iterator[str]:
    if not cache.enable_prefix_caching:
        yield "blocks go by no name (prefix caching)"
    groups = found.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        yield f"there are {len(groups)} groups of layers ({', '.join(kinds) or 'none'}), and only one can be"
        return
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ not in FULL:
        yield f"its attention is {type(spec).__name__}, and only full attention can be"
        return
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            yield f"its attention has a {name.replace('_', ' ')}, and only full attention can be"
    hashed = getattr(found, "hash_block_size", None) or getattr(cache, "hash_block_size", None) or spec.block_size
    if hashed != spec.block_size:
        yield f"a hash is of {hashed} tokens and a block of {spec.block_size}, which must be the same"


def found_wrong(relied: Relied) -> Iterator[str]:
    """Yield a sentence for each failed check of one name."""
    try:
        found = _named(relied.name)
    except (ImportError, AttributeError):
        yield f"{relied.name} is not there"
        return
    if missing := [field for field in relied.has.split() if field not in _fields(found)]:
        yield f"{relied.name} has no {' and no '.join(missing)}"
    if relied.of and not (isinstance(found, type) and issubclass(found, _named(relied.of))):
        yield f"{relied.name} is no {relied.of.partition(':')[2]}"
    if relied.takes is not None:
        yield from _wrong_signature(relied, found)


def _wrong_signature(relied: Relied, found: Any) -> Iterator[str]:
    if not callable(found):
        yield f"{relied.name} cannot be called"
        return
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY
    listed = [one for one in inspect.signature(found).parameters.values() if one.kind in plain and one.name != "self"]
    ours, theirs = (relied.takes or "").split(), [one.name for one in listed]
    if theirs[: len(ours)] != ours:
        yield f"{relied.name} takes ({', '.join(theirs)}), not ({', '.join(ours)})"
        return
    others = [one.name for one in listed[len(ours) :] if relied.overridden or one.default is inspect.Parameter.empty]
    if others:
        yield f"{relied.name} takes {' and '.join(others)} too"


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _fields(found: Any) -> set[str]:
    """Return the fields of a dataclass or a msgspec struct, inherited ones too."""
    names = {name for kind in inspect.getmro(found) for name in getattr(kind, "__annotations__", {})}
    return names | set(getattr(found, "__struct_fields__", ()))
