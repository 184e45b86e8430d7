"""A real vLLM engine core in this process, over a tiny model of random weights, asked and answered as a worker does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.requests import GenerateRequest, Output
from holdfast.engines.paged.scheduler import SchedulerSettings
from holdfast.engines.vllm.requests import OpenRequests

VOCABULARY = 1024
EOS = 1
CONTEXT = 512
BLOCK = 32
STEPS_MAX = 5000  # no test takes a tenth of it; an engine that stands still reaches it


@dataclass(frozen=True)
class Room:
    """As many blocks as a stream can have."""

    count: int
    block_tokens: int = BLOCK


def tiny_model(folder: Path) -> Path:
    """Weights large enough that the likeliest tokens differ from place to place, small enough that others are drawn."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Core:
    """`held`: vLLM draws as we do; else it is stock. `blocks` is all its KV, one of which vLLM keeps for itself."""

    def __init__(self, model: Path, *, held: bool = True, blocks: int = 257, step_tokens: int = 512) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from holdfast.engines.vllm.sampling import take_over

        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=CONTEXT,
            max_num_seqs=16,
            max_num_batched_tokens=step_tokens,
            kv_cache_memory_bytes=64 << 20,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=True,
            block_size=BLOCK,
            scheduling_policy="priority",
            distributed_executor_backend="uni",
        )
        config = arguments.create_engine_config()
        self.native = take_over(config) if held else False
        self.core = EngineCore(config, UniProcExecutor, log_stats=False)
        settings = SchedulerSettings(VOCABULARY, frozenset({EOS}), CONTEXT, concurrency=16, step_tokens_max=step_tokens)
        self.orders = OpenRequests(settings, Room(blocks - 1), native=self.native)
        self.streams = 0
        self.preemptions = 0

    def add(self, made: Any) -> None:
        request, _ = self.core.preprocess_add_request(made)
        self.core.add_request(request)

    def step(self) -> list[Any]:
        outputs, executed = self.core.step_fn()
        self.core.post_step(model_executed=executed)
        running = [*self.core.scheduler.running, *self.core.scheduler.waiting]
        self.preemptions = max([self.preemptions, *(request.num_preemptions for request in running)])
        return [each for batch in outputs.values() for each in batch.outputs]

    def ask(self, *asked: GenerateRequest) -> list[list[Output]]:
        """What each is answered, output by output."""
        first = self.streams + 1
        self.streams += len(asked)
        told: dict[int, list[Output]] = {first + place: [] for place in range(len(asked))}
        for number, request in zip(told, asked, strict=True):
            made = self.orders.take(number, request)
            if made is not None:
                self.add(made)
        for output in self.orders.take_early():
            told[output.stream].append(output)
        for _ in range(STEPS_MAX):
            if not self.core.scheduler.has_requests():
                return list(told.values())
            for output in self.orders.translate(self.step()):
                told[output.stream].append(output)
        raise AssertionError(f"{self.orders!r} after {STEPS_MAX} steps")

    def tokens(self, *asked: GenerateRequest) -> list[list[int]]:
        return [[token for output in told for token in output.tokens] for told in self.ask(*asked)]

    def close(self) -> None:
        """With it goes what all cores of this process share: no other makes another step."""
        self.core.shutdown()
