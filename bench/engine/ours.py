"""Our side of `python -m bench.engine`: runs the engine's scheduler and forward pass over plain memory.

Always true: all prompts are computed in one step, so that every stream decodes in every step after it, and the time
between its end and the last step's is decode alone. That step is fast in either arithmetic: exact prompts take minutes,
and what is measured comes after them. Nothing is skipped that the engine does for a step: plan, batch, forward, draw,
retire.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.engines.paged.blocks import PrivateBlocks, blocks_for
from holdfast.engines.paged.scheduler import Scheduler, SchedulerSettings
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.files.checkpoint import Checkpoint
from holdfast.engines.torch.files.resolve import resolve
from holdfast.engines.torch.model.attention import kv_view
from holdfast.engines.torch.model.decoder import arithmetic_for, bind
from holdfast.engines.torch.model.parameters import load, parameters
from holdfast.spec.engines import TorchSettings
from tests.rigs.engines.decoded import Decode, Tell

SHARES = 10  # lines that a load tells


def open_model(model: str, cache_dir: Path, tell: Tell) -> Checkpoint:
    return resolve(model, cache_dir, _Shares(tell))


class _Shares:
    """Tells progress as a line per tenth of a piece of work."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last = ("", -1)

    def __call__(self, work: str, done: int, total: int | None) -> None:
        share = done * SHARES // total if total else 0
        if (work, share) != self._last:
            self._last = (work, share)
            self._tell(f"{work}: {done / 2**20:.0f} of {total / 2**20:.0f} MiB" if total else f"{work} …")


class OurEngine:
    """Holds a model's weights in plain memory, fp32 on the CPU, and decodes in either arithmetic."""

    def __init__(self, checkpoint: Checkpoint, tell: Tell) -> None:
        self._config = checkpoint.config
        self._settings = TorchSettings().for_device(False)
        needed = parameters(self._config)
        self._weights = {parameter.name: torch.empty(parameter.shape) for parameter in needed}
        load(checkpoint, needed, self._weights, _Shares(tell))

    def fast(self, prompts: list[list[int]], tokens: int) -> Decode:
        return self._decode(prompts, tokens, exact=False)

    def exact(self, prompts: list[list[int]], tokens: int) -> Decode:
        return self._decode(prompts, tokens, exact=True)

    def _decode(self, prompts: list[list[int]], tokens: int, *, exact: bool) -> Decode:
        scheduler, kv = self._parts(prompts, tokens)
        for number, prompt in enumerate(prompts):
            sampling = Sampling(tokens, 0, temperature=0.0, ignore_eos=True)
            scheduler.submit(number, GenerateRequest(str(number), prompt, len(prompt), sampling))
        said: list[list[int]] = [[] for _ in prompts]
        self._step(scheduler, self._computer(kv, prompts, tokens, exact=False), said)
        computer = self._computer(kv, prompts, tokens, exact=exact)
        began = time.perf_counter(), time.process_time()
        while self._step(scheduler, computer, said):
            pass
        ended = time.perf_counter(), time.process_time()
        assert {len(one) for one in said} == {tokens}, "every stream decodes in every step"
        return Decode(said, ended[0] - began[0], ended[1] - began[1])

    def _step(self, scheduler: Scheduler, computer: Computer, said: list[list[int]]) -> bool:
        """One step; False: all streams have ended."""
        plan = scheduler.plan()
        if plan is None:
            return False
        for output in scheduler.retire(plan, *computer.compute(plan)):
            said[output.stream] += output.tokens
        return True

    def _parts(self, prompts: list[list[int]], tokens: int) -> tuple[Scheduler, torch.Tensor]:
        config, size = self._config, self._settings.block_tokens
        longest = max(map(len, prompts)) + tokens
        count = len(prompts) * blocks_for(longest + 1, size)
        block_items = config.layers * 2 * size * config.kv_heads * config.head_size
        kv = kv_view(torch.zeros(count * block_items), config.layers, config.kv_heads, config.head_size, size)
        settings = SchedulerSettings(
            vocabulary=config.vocabulary,
            eos_token_ids=frozenset(config.eos_token_ids),
            context_tokens_max=longest,
            concurrency=len(prompts),
            step_tokens_max=sum(map(len, prompts)) + len(prompts),
        )
        return Scheduler(settings, PrivateBlocks(range(count), size)), kv

    def _computer(self, kv: torch.Tensor, prompts: list[list[int]], tokens: int, *, exact: bool) -> Computer:
        longest = max(map(len, prompts)) + tokens
        arithmetic = arithmetic_for(self._config, exact, ranks=1)
        model = bind(self._weights, self._config, positions_max=longest, arithmetic=arithmetic)
        return Computer(model, kv, self._settings.block_tokens, len(prompts))
