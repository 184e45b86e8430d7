"""vLLM's real schedulers over our blocks, driven as its engine core drives them, with a model that is a sum."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from holdfast.engines.vllm.scheduler import VaultAsyncScheduler, VaultScheduler, namer
from tests.rigs.engines.vllm_blocks import Flight, World, next_token

SIZE = 4
TOKENS_MAX = 64
PRIVATE = 3  # of each of two engine slots
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": TOKENS_MAX,
    "torch_dtype": "float32",
}


def make_config(folder: Path, shared: int, policy: str) -> Any:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=TOKENS_MAX,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        enable_prefix_caching=True,
        scheduling_policy=policy,
        additional_config={"holdfast": {"shared": shared, "private_first": 1 + shared, "private_count": PRIVATE}},
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 1 + shared + 2 * PRIVATE
    return config


def make_scheduler(config: Any, *, ahead: bool) -> Any:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=16, dtype=torch.float32)
    return (VaultAsyncScheduler if ahead else VaultScheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=config.cache_config.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=SIZE,
        log_stats=False,
    )


class Engine:
    """`depth` 1 as `EngineCore.step`, more as `step_with_batch_queue`. Everything is checked after every call."""

    def __init__(self, config: Any, *, depth: int, ahead: bool) -> None:
        self.config, self.depth, self.ahead = config, depth, ahead
        self.world = World(config.additional_config["holdfast"]["shared"], SIZE)
        self.hasher = namer(bytes(16), SIZE)
        self.outputs: list[Any] = []  # of steps in flight, with `world.flights`
        self.requests: dict[str, Request] = {}  # all that are not over
        self.aborts: list[str] = []  # that came while a step ran: vLLM sees to them before it retires that step
        self.stands_by = False  # without a pool, so there is nothing to check
        self.count = self.preemptions = self.found = self.published = 0
        self.wake()

    def wake(self) -> None:
        self.scheduler = make_scheduler(self.config, ahead=self.ahead)
        self.vault = self.scheduler.vault
        self.vault.attach(self.world.pool)
        self.named: dict[int, bytes] = {}
        name, take = self.vault.name, self.vault.take

        def named(block: Any, key: bytes, depth: int, *, earlier: bool) -> None:
            name(block, key, depth, earlier=earlier)
            self.named[block.block_id] = key

        def taken(count: int) -> list[Any]:
            blocks = take(count)
            for block in blocks:
                self.named.pop(block.block_id, None)
            return list(blocks)

        self.vault.name, self.vault.take = named, taken

    def submit(self, tokens: list[int], made: int, *, priority: int = 0) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=made, temperature=0.0, ignore_eos=True)
        request = Request(f"r{self.count}", list(tokens), params, None, priority=priority, block_hasher=self.hasher)
        self.requests[request.request_id] = request
        keys = self.scheduler.keys_of(request)
        self.learn(request)
        assert self.vault.match(keys) <= len(keys)
        self.scheduler.add_request(request)

    def learn(self, request: Any) -> None:
        self.world.learn(list(request.all_token_ids), request.block_hashes)

    # -- the engine core

    def step(self) -> None:
        if self.scheduler.has_requests() and len(self.outputs) < self.depth:
            self.schedule()
            if len(self.outputs) < self.depth:
                return
        if self.outputs:
            self.retire()

    def schedule(self) -> None:
        output = self.scheduler.schedule()
        flight, drawn = Flight(), list[list[int]]()
        for number, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[number]
            text = list(request.all_token_ids)
            while len(text) <= request.num_computed_tokens:
                text.append(next_token(text))
            blocks = self.scheduler.kv_cache_manager.get_block_ids(number)[0]
            flight.plan(text, request.num_computed_tokens - count, count, blocks, SIZE)
            flight.members.append((request, count, not request.is_prefill_chunk))
            drawn.append([] if request.is_prefill_chunk else [text[request.num_computed_tokens]])
        self.found += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        self.preemptions += len(output.preempted_req_ids or ())
        self.world.flights.append(flight)
        self.outputs.append((output, drawn))
        self.check()

    def retire(self) -> None:
        output, drawn = self.outputs.pop(0)
        flight = self.world.land()
        numbers = list(output.num_scheduled_tokens)
        places = {number: place for place, number in enumerate(numbers)}
        made = ModelRunnerOutput(req_ids=numbers, req_id_to_index=places, sampled_token_ids=drawn)
        for number in self.aborts:
            if number in self.requests:
                self.abort(number)
        self.aborts.clear()
        self.scheduler.update_from_output(output, made)
        for request, _, _ in flight.members:
            self.learn(request)
        self.requests = {number: request for number, request in self.requests.items() if not request.is_finished()}
        self.check_punctual({block for block, slot in flight.writes if slot == SIZE - 1})
        self.check()

    def abort(self, number: str) -> None:
        self.scheduler.finish_requests([number], RequestStatus.FINISHED_ABORTED)
        del self.requests[number]

    def reset(self) -> None:
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.named.clear()
        assert not any(self.vault.match((key,)) for key in self.world.texts)
        self.check()

    def die(self) -> None:
        """All streams come back to the next engine with what they have shown."""
        streams = list(self.requests.values())
        self.outputs.clear()
        self.requests.clear()
        self.aborts.clear()
        self.world.die(canary=True)
        self.wake()
        for stream in streams:
            left = stream.max_tokens - stream.num_output_tokens
            self.submit(list(stream.all_token_ids), left, priority=stream.priority)
        self.check()

    def finish_all(self) -> None:
        for number in list(self.requests):
            self.abort(number)
        while self.outputs or self.scheduler.has_requests():
            self.step()
        self.world.check_at_rest(self.vault)

    # -- what must hold

    def check_punctual(self, complete: set[int]) -> None:
        """What this step completed is published, if it was named and no other has the block."""
        if self.stands_by:
            return
        pool = self.world.pool
        written = {block for flight in self.world.flights for block in flight.blocks}
        for block in (complete & self.named.keys()) - written:
            assert pool.match((self.named.pop(block),)), f"block {block} is late"
            self.published += 1
        for request in self.scheduler.running:
            in_flight = sum(count for f in self.world.flights for member, count, _ in f.members if member is request)
            keys = self.scheduler.keys_of(request)[: (request.num_computed_tokens - in_flight) // SIZE]
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            for key, block in zip(keys, blocks, strict=False):
                assert block in written or pool.match((key,)), f"block {block} is late"

    def check(self) -> None:
        if self.stands_by:
            return
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        held = [block for blocks in manager.req_to_blocks.values() for block in blocks]
        for block in {block.block_id: block for block in held}.values():
            assert block.ref_cnt == sum(block is other for other in held)
        self.world.check(self.vault, {block.block_id for block in held})
        self.world.check_adoption()


def live(engine: Engine, draw: Random, steps: int) -> None:
    """Streams come, are aborted and preempted; now and then the cache is reset, or the engine dies."""
    for _ in range(steps):
        chance = draw.random()
        if chance < 0.25 and len(engine.requests) < 8:
            prompt = [int(draw.random() < 0.1) for _ in range(draw.randint(1, TOKENS_MAX // 2))]
            engine.submit(prompt, draw.randint(1, TOKENS_MAX // 3), priority=draw.randrange(3))
        elif chance < 0.27 and engine.requests:
            engine.abort(draw.choice(list(engine.requests)))
            engine.check()
        elif chance < 0.29 and engine.requests:
            engine.aborts.append(draw.choice(list(engine.requests)))
        elif chance < 0.30:
            engine.reset()
        elif chance < 0.315:
            engine.die()
        elif chance < 0.35:
            engine.world.fence()
        engine.step()
    engine.finish_all()
