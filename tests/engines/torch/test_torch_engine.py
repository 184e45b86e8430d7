"""The torch engine beyond the engine contract (test_engine_contract.py): its step thread, its ends, its canary."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import torch

from holdfast.core.errors import UserError
from holdfast.core.requests import GenerateRequest
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.torch.files.resolve import TINY
from holdfast.spec.engines import TorchSettings
from tests.rigs.engines.any_engine import Vault
from tests.rigs.engines.torch_engine import BLOCK_GIB, Rig, doomed, on_launch, prompt, request, rig


async def alone(r: Rig, asked: GenerateRequest, number: int = 900) -> list[int]:
    await r.run({number: asked})
    return r.tokens(number)


async def test_steps_are_made_in_a_thread_of_their_own(vault: Vault) -> None:
    """Who asks for logprobs has them, beside those who do not; progress names another thread than the loop's."""
    async with rig(vault) as r:
        asked = {n: request(prompt(5, n), 12, top_logprobs=2 if n % 2 else None) for n in range(4)}
        await r.run(asked)
        for number in asked:
            assert all((output.logprobs is not None) == bool(number % 2) for output in r.of(number))
        progress = r.engine.progress()
        assert progress.step_ms_p99 > 0
        assert progress.thread is not None
        assert progress.thread[0] == os.getpid()
        assert progress.thread[1] not in (0, threading.get_native_id())


async def test_the_models_own_end_ends_a_stream_unless_it_is_ignored(vault: Vault) -> None:
    """It is the last id of a stream that finishes with "stop"; an ignored one ends nothing."""
    async with rig(vault) as r:
        eos = TINY.eos_token_ids[0]
        to_eos = {"logit_bias": {eos: 100.0}, "ignore_eos": False}
        await r.run({1: request(prompt(9), 30, **to_eos), 2: request(prompt(9), 8, **(to_eos | {"ignore_eos": True}))})
        assert (r.tokens(1), r.of(1)[-1].finish) == ([eos], "stop")
        assert (r.tokens(2), r.of(2)[-1].finish) == ([eos] * 8, "length")


async def test_what_was_made_before_a_cancel_is_not_said_after_it(vault: Vault) -> None:
    """A step's tokens that wait for the loop when a stream is cancelled are dropped, and are not the next stream's of
    the same number."""
    async with rig(vault) as r:
        right = await alone(r, request(prompt(6, 2), 5))
        r.engine.submit(1, request(prompt(4), 3000))
        await r.until(lambda: len(r.tokens(1)) >= 2)
        made = r.engine.progress().steps
        while r.engine.progress().steps < made + 3:  # bounded by the test's own timeout: the loop must not turn here
            pass
        r.engine.cancel(1)
        before = len(r.of(1))
        r.engine.submit(1, request(prompt(6, 2), 5))
        await r.until(lambda: r.ended(1))
        assert [token for output in r.of(1)[before:] for token in output.tokens] == right


async def test_a_stream_that_ends_as_the_engine_rests_is_told(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step under way when a rest begins is the last, and what it made is said, a stream's end too; so is the end
    of one that had nothing left to make."""
    async with rig(vault) as r:
        at_last, go_on = threading.Event(), threading.Event()
        steps = iter(range(4))

        def gate(plan: StepPlan) -> None:
            if next(steps, None) is None:
                at_last.set()
                assert go_on.wait(60)

        on_launch(monkeypatch, gate)
        r.submit({1: request(prompt(3), 5), 2: request(prompt(3, 1), 50)})
        await asyncio.to_thread(at_last.wait, 60)
        r.engine.submit(3, request(prompt(3), 0))
        resting = asyncio.create_task(r.engine.become_standby())
        async with asyncio.timeout(60):
            while r.hosted._stepper.scheduler is not None:
                await asyncio.sleep(0)
        go_on.set()
        await resting
        assert (len(r.tokens(1)), r.of(1)[-1].finish) == (5, "length")
        assert (r.tokens(3), r.of(3)[-1].finish) == ([], "length")
        assert r.lost == [2]


async def test_an_idle_engine_makes_no_step(vault: Vault) -> None:
    """Without streams no step is made: at the start, after a stream's end and after a cancel."""
    async with rig(vault) as r:
        assert r.engine.progress().steps == 0
        await r.run({1: request(prompt(3), 5)})
        steps = r.engine.progress().steps
        assert steps == 5
        r.engine.submit(2, request(prompt(3), 3000))
        await r.until(lambda: len(r.tokens(2)) >= 1)
        r.engine.cancel(2)
        await asyncio.to_thread(r.hosted._stepper._idle.wait, 60)  # for the step under way at the cancel
        await asyncio.sleep(0.01)
        settled = r.engine.progress().steps
        await asyncio.sleep(0.05)
        assert r.engine.progress().steps == settled


async def test_a_failed_step_ends_the_engine(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device is fatal, says what it was, and no token of that step or after it is said."""
    steps = iter(range(5))

    def fail(plan: StepPlan) -> None:
        if next(steps, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async with doomed(vault, "illegal memory access") as r:
        on_launch(monkeypatch, fail)
        r.engine.submit(1, request([1], 30))
        await r.until(lambda: bool(r.heard("fatal")))
        assert len(r.tokens(1)) == 5


async def test_a_standby_checks_itself_beside_the_pool(vault: Vault) -> None:
    """An engine that stands by runs its canary right, in memory of its own: the owner's pages do not change, and the
    owner's own canary is right while it works."""
    async with rig(vault) as r:
        await r.run({1: request(prompt(100), 20)})

        def pages() -> torch.Tensor:
            return r.ready.computer.kv[: r.hosted.geometry.block_count].clone()

        before = pages()
        standby = Rig(vault, engine_id=1)
        await standby.load()
        assert standby.hosted.canary.tokens == r.hosted.canary.tokens
        assert await standby.engine.check() == ""
        assert torch.equal(pages(), before)
        assert before.any()
        r.engine.submit(2, request(prompt(50, 1), 40))
        assert await r.engine.check() == ""
        await r.until(lambda: r.ended(2))
        await standby.engine.stop()


@pytest.mark.parametrize("field", ["block_tokens", "concurrency", "queue", "kv_gib", "threads", "step_tokens_max"])
def test_settings_name_a_bad_field(field: str) -> None:
    """A negative setting is refused with its name."""
    with pytest.raises(ValueError, match=field):
        TorchSettings(**{field: -1})  # type: ignore[arg-type]


def test_a_pool_of_no_block_is_refused(vault: Vault) -> None:
    """A pool too small for two blocks is refused in words a person can act on."""
    with pytest.raises(UserError, match="kv_gib"):
        Rig(vault, kv_gib=BLOCK_GIB)
