"""vLLM's own schedulers and block pool, over blocks that end with their engine (`--kv direct`). Loaded by vLLM, as its
`scheduler_cls`.

No engine adopts these blocks, so they may be of any kind that vLLM has: sliding windows, several groups of layers,
states, quantised ones. A resumed stream is computed again. A standby has memory only for its private blocks, in which
it answers its canary; `OwnBlocks` withholds all others until there is memory for them.

Always true: without a pool only the private blocks are handed out. Blocks computed before there was a pool are not
found later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from holdfast.engines.vllm.scheduler import SETTINGS, OneAlone
from holdfast.kv.index import Misuse
from holdfast.kv.pool import KvUse, Pool


class OwnBlocks:
    """The counterpart of `VaultBlocks` over vLLM's own block pool (`own`). `attach` and `detach` are called while no
    request holds a block."""

    books: AbstractContextManager[object] = nullcontext()  # only vLLM changes them

    def __init__(self, own: Any, private_count: int) -> None:
        self._own, self._private_count = own, private_count
        self._aside: list[Any] = []  # blocks that must not be handed out
        self._serves = False
        self._asked_tokens = self._found_tokens = 0
        self._set_aside()

    def __repr__(self) -> str:
        return f"<vLLM's own blocks: {self.use()}>"

    def attach(self, pool: Pool) -> None:
        """Use all blocks, which have memory now; `pool` is ignored."""
        if self._serves:
            raise Misuse(f"there is a pool already: {self!r}")
        self._own.free_blocks(self._aside)
        self._aside.clear()
        if not self._own.reset_prefix_cache():
            raise Misuse(f"private blocks are in use: {self!r}")
        self._serves = True

    def detach(self) -> None:
        self._set_aside()
        self._serves = False

    def _set_aside(self) -> None:
        count = self._own.num_gpu_blocks - 1  # one is vLLM's filler
        if self._own.get_num_free_blocks() != count:
            raise Misuse(f"still in use: {self!r}")
        taken = self._own.get_new_blocks(count)  # with it all names are forgotten
        self._aside = [block for block in taken if block.block_id > self._private_count]
        self._own.free_blocks([block for block in taken if block.block_id <= self._private_count])

    def match(self, keys: list[bytes]) -> int:
        """Return 0: a stream's earlier blocks ended with their engine."""
        return 0

    def started(self, asked_tokens: int, found_tokens: int) -> None:
        self._asked_tokens += asked_tokens
        self._found_tokens += found_tokens

    def use(self) -> KvUse:
        """Return how full the pool is; callable from any thread. Only vLLM knows which free blocks are reusable."""
        count = self._own.num_gpu_blocks - 1 if self._serves else self._private_count
        return KvUse(count, count - self._own.get_num_free_blocks(), 0, self._asked_tokens, self._found_tokens)


class DirectScheduler(OneAlone):
    """vLLM's scheduler, which also reports each planned step."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        own, private = self.kv_cache_manager.block_pool, int(vllm_config.additional_config[SETTINGS]["private_count"])
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        longest = sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)
        if own.num_gpu_blocks <= max(longest, private):
            raise ValueError(f"a text of max_model_len takes {longest} blocks, and there are {own.num_gpu_blocks}")
        self.vault = OwnBlocks(own, private)
        self.on_planned: Callable[[Any], None] = lambda output: None  # hears of each step as it is planned

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            if not request.skip_reading_prefix_cache:
                self.vault.started(request.num_tokens - 1, new.num_computed_tokens)
        self.on_planned(output)
        return output

    def keys_of(self, request: Any) -> list[bytes]:
        """Return the names of a request's blocks, none of which is here."""
        return [b""] * (int(request.num_tokens - 1) // int(self.block_size))


class DirectAsyncScheduler(DirectScheduler, AsyncScheduler):
    """The same where vLLM plans a step before the one in flight has retired."""
