"""What steps need, made and tried before anybody waits for it: a computer with its graphs, and a canary's word for it.

Always true: a computer is used only for the very range (address, size, where private memory begins) and the mapped
weights it was made for: an address alone may be another range's later, and private blocks would then be the pool's. The
canary writes private blocks only, which lie behind the pool's pages, so a standby may run it beside an owner. Called in
the step thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs

from holdfast import __version__
from holdfast.engines.paged.canary import canary_request, canary_scheduler, canary_steps, run_canary
from holdfast.engines.paged.scheduler import Scheduler
from holdfast.engines.paged.settings import SchedulerSettings
from holdfast.engines.shadow.answers import answers_in, known_answer
from holdfast.engines.shadow.proving import TOLERANCE_NATS, Canary
from holdfast.engines.torch.canary import code_identity
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.files.checkpoint import Progress
from holdfast.engines.torch.gpu.warm_up import warm_up
from holdfast.engines.torch.model.weights import TorchWeights
from holdfast.engines.torch.ranks.leader import Leader
from holdfast.engines.torch.ranks.share import RankWork
from holdfast.engines.torch.stepper import threads_for
from holdfast.memory.client.pool_mapping import PoolMapping
from holdfast.memory.torch.arithmetic import arithmetic

TOP = 4  # likeliest tokens that a canary is asked to tell: among them is the known one, where its answer rounds


@dataclass(frozen=True, slots=True)
class Ready:
    """Made for one range of pages and for one set of mapped weights."""

    where: tuple[int, int, int]  # address, size, where in it private memory begins
    tensors: dict[str, torch.Tensor]
    computer: Computer
    blocks: range  # private ones, for canaries; behind them is one more, the filler


class Readiness:
    """`ready` is what was made last."""

    def __init__(self, work: RankWork, weights: TorchWeights, leader: Leader, folder: Path, progress: Progress) -> None:
        self._work, self._weights, self._leader = work, weights, leader
        self._answers, self._progress = answers_in(folder), progress
        request = canary_request(work.checkpoint.config.vocabulary)
        # Several ranks have no steps for it alone while they serve: there it is batched with others, and rounds.
        rounds = leader.count > 1 and not work.settings.exact
        if rounds:
            request = structs.replace(request, sampling=structs.replace(request.sampling, top_logprobs=TOP))
        self.canary = Canary(request, (), tolerance_nats=TOLERANCE_NATS if rounds else 0.0)
        self.ready: Ready | None = None
        self._filled: Ready | None = None  # in whose private blocks the canary's prompt is

    def found(self, address: int, size: int, private_at: int) -> Ready | None:
        """What is ready for that range, if it is."""
        ready, where = self.ready, (address, size, private_at)
        fits = ready is not None and ready.where == where and ready.tensors is self._weights.tensors
        return ready if fits else None

    def make(self, address: int, size: int, private_at: int) -> Ready:
        """Compiles and captures, unless that is done. `private_at`: where in the range private memory begins."""
        ready = self.found(address, size, private_at)
        if ready is not None:
            return ready
        work, tensors = self._work, self._weights.tensors
        computer = self._leader.computer(tensors, address, size)
        blocks = range(-(-private_at // work.geometry.block_bytes), computer.kv.shape[0] - 1)
        if computer.kv.is_cuda and self._leader.count == 1:  # it computes, and so would need the others
            width = -(-work.positions_max // work.settings.block_tokens)
            warm_up(computer, work.settings.step_tokens_max, width, blocks.stop, self._progress)
        self.ready = Ready((address, size, private_at), tensors, computer, blocks)
        return self.ready

    def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """The canary, alone, over what is mapped: what is to blame if its answer is not the known one. Dropped, if that
        is so between two of its steps."""
        ready = self.make(mapping.pages_address, mapping.range_size, mapping.private_at)
        computer = self._leader.canary_computer(ready.computer, ready.blocks.start)
        settings, size = self.settings_for(ready.computer), self._work.settings.block_tokens
        steps = canary_steps(self.canary.request, settings, computer.compute, ready.blocks, size)
        tokens = run_canary(steps, dropped)
        if tokens != self.canary.tokens:  # else the file was asked before, whatever it has by now
            known = known_answer(self._answers, self._kind(computer), tokens)
            self.canary = replace(self.canary, tokens=known, known_from=str(self._answers))
        is_right = tokens == self.canary.tokens
        self._filled = ready if is_right else None
        return "" if is_right else self.canary.suspects

    def alone(self, ready: Ready) -> Scheduler:
        """For a canary beside the streams, in steps of its own, which then have the very shapes of `check`'s."""
        settings, size = self.settings_for(ready.computer), self._work.settings.block_tokens
        filled, self._filled = self._filled is ready, None  # a second answer is computed from the prompt on
        return canary_scheduler(settings, ready.blocks, size, filled=filled)

    def settings_for(self, computer: Computer) -> SchedulerSettings:
        config, settings = self._work.checkpoint.config, self._work.settings
        return SchedulerSettings(
            config.vocabulary,
            frozenset(config.eos_token_ids),
            self._work.positions_max,
            settings.concurrency,
            settings.queue,
            settings.step_tokens_max,
            computer.ahead,
        )

    def _kind(self, computer: Computer) -> str:
        """All that can change the answer: engines of one kind answer alike."""
        settings, device = self._work.settings, computer.kv.device
        how = f"{'exact' if settings.exact else 'fast'}, blocks of {settings.block_tokens}"
        how += f", {self._work.positions_max} positions, {self._leader.count} ranks, {settings.concurrency} streams"
        how += f", steps of {settings.step_tokens_max}, Holdfast {__version__}, code {code_identity()}"
        return f"{self._weights.identity}, {how}, {arithmetic(device, threads_for(settings.threads))}"
