"""Lists vLLM's options that users may not set under Holdfast, each with its reason, and those that are passed on.

Always true: every option of the tested versions is in exactly one of the two tables (a test compares them with vLLM).
An option of a later version that is in neither is passed on and reported. Pure: a wrong word is refused before vLLM is
loaded, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.errors import Refused
from holdfast.spec.engines import vllm_options

_TEXT = "text is the frontends': they read the model's tokenizer.json; {}"
_HUB = "the model is on this machine by then; {}"
_POOL = "the KV pool is Holdfast's, and lies in the vault; {}"
_ONE = "of ways to share a model between devices only --tensor-parallel-size is served; leave it out"
_FULL = "KV of full attention is what another engine can go on with; leave it out, or use --kv direct"
_MEDIA = "requests are text; leave it out"
_LORA = "adapters are not served yet; merge it into the weights, or leave it out"
_DRAFTS = "drafts are not served yet: a drafter's KV may be unfinished when its step is published; leave it out"
_CONNECTOR = "KV goes to no connector: the next engine takes it over where it lies; leave it out"
_WEIGHTS = "the weights are in the vault, where every engine of the pair reads them; leave it out"
_FIGURES = "vLLM's own figures are not taken: Holdfast's are at /metrics; leave it out"
_DRAWN = "every engine draws alike, so that a resumed stream goes on as the unbroken one would; leave it out"
_FORM = "that is the frontends' to do, and they do not offer it; leave it out"
_OWN = "that is how Holdfast is inside vLLM; leave it out"


@dataclass(frozen=True, slots=True)
class ReservedOption:
    """Why an option is refused, and the values that are what it is anyway. `kept`: only where KV outlives its engine,
    not with --kv direct."""

    why: str
    fine: tuple[object, ...] = ()
    kept: bool = False


def _all(why: str, names: str, *, kept: bool = False) -> dict[str, ReservedOption]:
    return {name: ReservedOption(why, kept=kept) for name in names.split()}


# By the option's name as vLLM's EngineArgs has it.
RESERVED: dict[str, ReservedOption] = {
    # the model, and its text
    "model": ReservedOption("the model is said before --, with --model"),
    "model_weights": ReservedOption("the model is said before --, with --model"),
    "served_model_name": ReservedOption("the name is said before --, with --served-name"),
    "hf_config_path": ReservedOption("the model's own config.json is read; change it there"),
    "revision": ReservedOption(_HUB.format("say --model org/name@revision before --")),
    "code_revision": ReservedOption(_HUB.format("leave it out")),
    "hf_token": ReservedOption(_HUB.format("Holdfast fetches with $HF_TOKEN")),
    "download_dir": ReservedOption(_HUB.format("the Hub's cache is $HF_HOME")),
    "tokenizer": ReservedOption(_TEXT.format("change that")),
    "tokenizer_mode": ReservedOption(_TEXT.format("leave it out")),
    "tokenizer_revision": ReservedOption(_TEXT.format("leave it out")),
    "skip_tokenizer_init": ReservedOption(_TEXT.format("leave it out"), (True,)),
    "generation_config": ReservedOption("defaults of sampling are the model's generation_config.json; change that"),
    "override_generation_config": ReservedOption(
        "defaults of sampling are the model's generation_config.json; change that"
    ),
    "runner": ReservedOption("models are served that generate text; leave it out", ("auto", "generate")),
    "convert": ReservedOption("models are served that generate text; leave it out", ("auto", "none")),
    "pooler_config": ReservedOption("models are served that generate text; leave it out"),
    "tokens_only": ReservedOption(_OWN),
    # how much, and for how many
    "max_model_len": ReservedOption("the context's length is said before --, with --context"),
    **_all("how many streams run at once is said before --, with --streams-max", "max_num_seqs max_num_active_seqs"),
    "max_num_queued_reqs": ReservedOption("how many may wait is the worker's to say; leave it out"),
    "max_num_queued_tokens": ReservedOption("how many may wait is the worker's to say; leave it out"),
    "kv_cache_memory_bytes": ReservedOption(_POOL.format("its size is said before --, with --kv-gib")),
    "gpu_memory_utilization": ReservedOption(_POOL.format("its size is said before --, with --kv-gib")),
    "num_gpu_blocks_override": ReservedOption(_POOL.format("its size is said before --, with --kv-gib")),
    "enable_prefix_caching": ReservedOption(
        "resumed streams go on with what the pool has of them; leave it out", (True,), True
    ),
    "prefix_caching_hash_algo": ReservedOption(
        "blocks have the names that Holdfast gives them; leave it out", (), True
    ),
    "kv_cache_dtype": ReservedOption(
        "a quantised KV cache was not taken over yet; leave it out, or use --kv direct",
        ("auto", "bfloat16", "float16"),
        True,
    ),
    **_all(
        _POOL.format("leave it out, or use --kv direct"),
        "prefix_cache_retention_interval prefix_match_unit kv_cache_dtype_skip_layers",
        kept=True,
    ),
    "calculate_kv_scales": ReservedOption(
        "scales found while serving are unknown to the next engine; leave it out", (False,)
    ),
    # what is computed where
    "pipeline_parallel_size": ReservedOption(_ONE, (1,)),
    "data_parallel_size": ReservedOption("several engines are --workers, before --", (1,)),
    "nnodes": ReservedOption(_ONE, (1,)),
    "prefill_context_parallel_size": ReservedOption(_ONE, (1,)),
    "decode_context_parallel_size": ReservedOption(_ONE, (1,)),
    "distributed_executor_backend": ReservedOption(_ONE, ("uni",)),
    "device_ids": ReservedOption("the device is said before --, with --device"),
    **_all(
        _ONE,
        "master_addr master_port node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind "
        "numa_bind_nodes numa_bind_cpus dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend enable_hc_sp enable_expert_parallel "
        "enable_batch_sharded_sampling enable_ep_weight_filter all2all_backend enable_elastic_ep "
        "elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
        "dp_sync_interval disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy "
        "_api_process_count _api_process_rank max_parallel_loading_workers "
        "enable_shm_tensor_arena ray_workers_use_nsight enable_nccl_comm_suspend",
    ),
    # how Holdfast is inside
    **_all(_OWN, "worker_cls worker_extension_cls scheduler_cls"),
    "scheduling_policy": ReservedOption("tiers decide which request goes first; leave it out", ("priority",)),
    "stream_interval": ReservedOption("every step's tokens are sent at once; leave it out", (1,)),
    "shutdown_timeout": ReservedOption("how long an engine may take to leave is --drain-s, before --"),
    **_all("Holdfast replaces engines that fail; leave it out", "enable_fault_tolerance fault_tolerance_config"),
    # weights
    "load_format": ReservedOption(
        "weights are read from safetensors, then in the vault; leave it out", ("auto", "safetensors")
    ),
    **_all(
        _WEIGHTS,
        "model_loader_extra_config weight_transfer_config offload_backend cpu_offload_gb cpu_offload_params "
        "offload_group_size offload_num_in_group offload_prefetch_step offload_params enable_sleep_mode "
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator",
    ),
    **_all(
        _LORA,
        "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype "
        "lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras max_lora_cls_labels",
    ),
    # KV that goes elsewhere, or is another kind
    **_all(
        _CONNECTOR,
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config kv_offloading_size "
        "kv_offloading_backend",
    ),
    **_all(
        _FULL,
        "kv_sharing_fast_prefill swa_bounded_replay mamba_config mamba_backend mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm "
        "mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds gdn_prefill_backend "
        "kda_prefill_backend kda_decode_backend engram_config",
        kept=True,
    ),
    **_all(_DRAFTS, "speculative_config spec_method spec_model spec_tokens diffusion_config"),
    # what is drawn, and told of it
    "logprobs_mode": ReservedOption("logprobs are the model's own; leave it out", ("raw_logprobs",)),
    **_all(_DRAWN, "logits_processors watermark_config enable_trace_replay"),
    **_all(_FORM, "structured_outputs_config reasoning_parser reasoning_parser_plugin reasoning_config"),
    **_all(_FORM, "enable_return_routed_experts return_sampling_mask aux_output_config enable_prompt_embeds"),
    **_all(
        _MEDIA,
        "allowed_local_media_path allowed_media_domains enable_mm_embeds interleave_mm_strings media_io_kwargs "
        "mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
        "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers video_pruning_rate "
        "video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize "
        "disable_chunked_mm_input enable_mm_processor_stats",
    ),
    **_all(
        _FIGURES,
        "disable_log_stats aggregate_engine_logging show_hidden_metrics_for_version otlp_traces_endpoint "
        "collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample "
        "custom_histogram_buckets cudagraph_metrics enable_mfu_metrics profiler_config",
    ),
}

# What a person may say: arithmetic, kernels, compilation, steps, and what vLLM logs.
PASSED = frozenset(
    _all(
        "",
        "additional_config allow_deprecated_quantization async_scheduling attention_backend attention_config "
        "block_size compilation_config config_format cudagraph_capture_sizes disable_cascade_attn "
        "disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_sliding_window dtype "
        "enable_bf16x3_router_gemm enable_chunked_prefill enable_flashinfer_autotune enable_layerwise_nvtx_tracing "
        "enable_logging_iteration_details enforce_eager fail_on_environ_validation hf_overrides "
        "ignore_patterns ir_op_priority jit_monitor_mode jit_monitor_verbose kernel_config "
        "language_model_only limit_mm_per_prompt linear_backend log_config_file log_level logging_config "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_cudagraph_capture_size "
        "max_logprobs max_long_partial_prefills max_num_batched_tokens "
        "max_num_partial_prefills max_num_scheduled_tokens model_class_overrides model_impl moe_backend "
        "optimization_level override_attention_dtype performance_mode prefill_schedule_interval "
        "pt_load_map_location quantization quantization_config safetensors_load_strategy "
        "safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl seed "
        "skip_mm_profiling sparse_indexer_topk_backend trust_remote_code use_fp64_gumbel use_tqdm_on_load "
        "tensor_parallel_size watermark",
    )
)


def check_arguments(words: Sequence[str], *, direct: bool = False) -> None:
    """Raise Refused with the first word that is an option of ours, spelled out. vLLM takes some by other spellings,
    too: `check_given` is called again with what it understood. `direct`: KV ends with its engine."""
    for name, value in vllm_options(words):
        if name in ("help", "h"):
            raise Refused("--help: vLLM's options are shown by `vllm serve --help=all`")
        if name == "config":
            raise Refused("--config: what is in that file is to be said here, word by word, or in `holdfast up -c`")
        check_given(name, value, direct=direct)


def check_given(name: str, value: object, *, direct: bool = False) -> None:
    """Raise Refused if that value of an option, by its name in EngineArgs, is not a person's to set."""
    ours = RESERVED.get(name)
    if ours is None or (direct and ours.kept):
        return
    if str(value).lower() not in {str(fine).lower() for fine in ours.fine}:
        raise Refused(f"{flag_of(name, value)} of vLLM is not to be set here: {ours.why}")


def value_of(words: Sequence[str], name: str) -> str:
    """Return the last value of an option in the words, as far as that can be told without vLLM, or ""."""
    return str(dict(vllm_options(words)).get(name, ""))


def flag_of(name: str, value: object = None) -> str:
    dashed = name.strip("_").replace("_", "-")
    return f"--no-{dashed}" if value is False else f"--{dashed}"
