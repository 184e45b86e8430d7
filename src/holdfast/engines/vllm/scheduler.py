"""vLLM's own schedulers over blocks that outlive the engine. Loaded by vLLM, as its `scheduler_cls`.

It relies on this in vLLM (0.26.0 and 0.32.0):
- `EngineCore` calls `update_from_output` once for every `schedule`, in the same order, also for empty steps. At that
  time the device has finished all writes of that step and of earlier ones.
- With one group of full attention, vLLM uses the block pool only through the methods below, and no code reads its
  fields.

An exception from either call leaves the step unretired, and the engine must end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from holdfast.engines.vllm.blocks import Block, VaultBlocks
from holdfast.kv.geometry import block_keys

SETTINGS = "holdfast"  # in vLLM's additional_config: {"shared": S, "private_first": id, "private_count": n}


def namer(root: bytes, block_tokens: int) -> Callable[[Any], list[bytes]]:
    """Return the function that vLLM calls to name a request's full blocks that have no name yet. The names are the
    pool's keys: a request's KV depends only on its tokens. A takeover names thousands of blocks before the first token,
    and vLLM's own hashing takes six times as long."""

    def names(request: Any) -> list[bytes]:
        known = request.block_hashes
        start = len(known) * block_tokens
        if request.num_tokens < start + block_tokens:
            return []
        return block_keys(known[-1] if known else root, request.all_token_ids[start:], block_tokens)

    return names


class VaultBlockPool(BlockPool):
    """vLLM's block pool, with its methods answered by `vault`. Its own bookkeeping is unused and must not be read."""

    vault: VaultBlocks

    def become(self, vault: VaultBlocks) -> None:
        self.vault = vault
        del self.free_block_queue, self.cached_block_hash_to_block, self.cached_block_hashes_by_block

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Block] | None:
        block = self.vault.find(block_hash)
        return None if block is None else [block]

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: None = None,
    ) -> None:
        assert block_mask is None, "full attention keeps every block"
        for depth in range(num_cached_blocks, num_full_blocks):
            earlier = (depth + 1) * block_size <= request.num_computed_tokens
            self.vault.name(blocks[depth], request.block_hashes[depth], depth, earlier=earlier)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        return self.vault.take(num_blocks)

    def touch(self, blocks: Sequence[Block]) -> None:
        self.vault.touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        self.vault.give_back(ordered_blocks)

    def reset_prefix_cache(self) -> bool:
        return self.vault.reset()

    def get_num_free_blocks(self) -> int:
        return self.vault.room

    def get_usage(self) -> float:
        return self.vault.use().usage

    def _not_here(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("asked for KV connectors, partial blocks and other attention only, which are refused")

    evict_blocks = cache_partial_block = move_block_hashes = unpin_blocks = _not_here


class OneAlone(Scheduler):
    """vLLM's scheduler that can run one request (`alone`, its id; "": none) in separate steps, which alternate with the
    others': its answer then does not depend on the batch. vLLM itself leaves requests out of a step whose budget is
    spent."""

    running: list[Any]
    alone = ""
    _turn = False  # it is the others' next

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.alone not in self.requests:
            self.alone, self._turn = "", False
            return super().schedule(*args, **kwargs)
        self._turn = not self._turn
        with self._hidden([each for each in self.requests.values() if (each.request_id == self.alone) != self._turn]):
            return super().schedule(*args, **kwargs)

    @contextmanager
    def _hidden(self, requests: list[Any]) -> Iterator[None]:
        """Hide these requests from the scheduler meanwhile."""
        names, there = {each.request_id for each in requests}, list(self.running)
        runs = [each for each in there if each.request_id in names]
        self.running = [each for each in there if each.request_id not in names]
        waits = [each for each in self.waiting if each.request_id in names]
        self.waiting.remove_requests(waits)
        try:
            yield
        finally:
            self.running = runs + self.running
            for each in waits:
                self.waiting.add_request(each)


class VaultScheduler(OneAlone):
    """vLLM's scheduler over `vault`, which begins without a pool. It holds `vault.books` while it changes blocks."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        self._size = _block_size(self.kv_cache_manager.coordinator.single_type_managers, pool)
        said = vllm_config.additional_config[SETTINGS]
        shared, first = int(said["shared"]), int(said["private_first"])
        private = range(first, first + int(said["private_count"]))
        longest = -(-self.max_model_len // self._size)
        if shared < longest:
            raise ValueError(f"a text of max_model_len takes {longest} blocks, and the KV pool has {shared}")
        self.vault = VaultBlocks(pool.blocks, shared=shared, private=private, text_blocks_max=longest)
        self.on_planned: Callable[[Any], None] = lambda output: None  # hears of each step as it is planned
        pool.__class__ = VaultBlockPool
        pool.become(self.vault)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with self.vault.books:
            self.vault.planning()
            output = super().schedule(*args, **kwargs)
            self.vault.planned()
            for new in output.scheduled_new_reqs:
                request = self.requests[new.req_id]
                if not request.skip_reading_prefix_cache:
                    self.vault.started(self._findable(request) * self._size, new.num_computed_tokens)
        self.on_planned(output)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        with self.vault.books:
            outputs = super().update_from_output(*args, **kwargs)
            self.vault.retired()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self.vault.books:
            return super().finish_requests(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        with self.vault.books:
            return bool(super().reset_prefix_cache(*args, **kwargs))

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.vault.preempting = True
        try:
            super()._preempt_request(*args, **kwargs)
        finally:
            self.vault.preempting = False

    def keys_of(self, request: Any) -> list[bytes]:
        """Return the keys of the blocks that a request will look for, for `vault.match` and `kv.pool`."""
        keys: list[bytes] = request.block_hashes[: self._findable(request)]
        return keys

    def _findable(self, request: Any) -> int:
        """Return the number of blocks to look for; a request's last token is always computed."""
        return int(request.num_tokens - 1) // self._size


class VaultAsyncScheduler(VaultScheduler, AsyncScheduler):
    """The same where vLLM plans a step before the one in flight has retired."""


def _block_size(managers: Sequence[Any], pool: Any) -> int:
    """Return the block size in tokens; raise ValueError if `VaultBlockPool` does not support this configuration
    (`hooks` has refused such ones before)."""
    (manager,) = managers
    size = int(manager.block_size)
    if type(manager) is not FullAttentionManager or pool.hash_block_size != size or not pool.enable_caching:
        raise ValueError(f"blocks of one group of full attention, each with one hash, are needed; here is {manager}")
    return size
