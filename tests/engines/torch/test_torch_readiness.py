"""What is ready before anybody waits for it: kernels compiled without dying of it, and a canary whose answer is known.

The file of canaries' known answers is keyed by all that can change them, and keeps no engine from starting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.core.procfs import cpu_model
from holdfast.engines.host.answers import KINDS_MAX, answers_in, known_answer
from holdfast.engines.paged.sequences import StepPlan
from holdfast.engines.torch import computer
from holdfast.engines.torch.engine import Readiness, ReadyComputer, code_identity
from tests.rigs.engines.any_engine import BOUND_S, Vault
from tests.rigs.engines.torch_engine import Rig, on_launch, prompt, request, rig, rigs


async def test_a_wake_that_compiles_says_so_and_goes_on(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, what is not ready for the pool's addresses is made in the wake: whoever bounds the wake hears it before
    it begins, so that it gets a load's time; the engine answers meanwhile, and serves after it. Where all is ready
    nothing is said."""
    began, gate = threading.Event(), threading.Event()
    real = Readiness.make

    def slow(self: Readiness, address: int, size: int, private_at: int) -> ReadyComputer:
        began.set()
        assert gate.wait(BOUND_S)
        return real(self, address, size, private_at)

    async with rig(vault) as r:
        r.hosted._device = torch.device("cuda")  # as far as a wake is concerned
        await r.engine.become_standby()
        await r.engine.wake(2000)
        assert r.heard("loading") == []
        await r.engine.become_standby()
        r.hosted._readiness.ready = None
        monkeypatch.setattr(Readiness, "make", slow)
        waking = asyncio.ensure_future(r.engine.wake(3000))
        assert await asyncio.to_thread(began.wait, BOUND_S)
        (told,) = r.heard("loading")
        assert "compiled" in told
        assert r.engine.progress().budget_ms > BOUND_S * 1000
        assert not waking.done()
        gate.set()
        await waking
        await r.run({1: request(prompt(20), 5)})
        assert len(r.tokens(1)) == 5


async def test_exact_warms_up_by_one_block_and_says_what_it_costs(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every row is a call of its own, so a step of one block has them all: not every size is computed position by
    position. What a position takes is logged."""
    plans: list[StepPlan] = []
    async with rig(vault) as r:
        on_launch(monkeypatch, plans.append)
        monkeypatch.setattr(computer, "pin_ahead", lambda: None)
        with caplog.at_level(logging.WARNING, "holdfast.engine"):
            computer.warm_up(r.ready.computer, 512, 16, r.ready.blocks.stop, lambda *_: None)
        assert [plan.token_count for plan in plans] == [16, 16]
        assert "every position is computed by itself" in caplog.text


async def test_what_is_ready_is_for_one_range_not_for_an_address(vault: Vault) -> None:
    """A larger range at the same address is another: its private blocks lie elsewhere, and what was made for the
    smaller one would write into the pool's."""
    async with rig(vault) as r:
        found = r.hosted._readiness.found
        address, size, private_at = r.ready.where
        assert found(address, size, private_at) is r.ready
        assert found(address, 2 * size, private_at) is None
        assert found(address, size, 0) is None
        assert r.ready.blocks.start * r.hosted.geometry.block_bytes >= private_at > 0


async def test_nothing_moves_under_a_running_canary(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby's canary computes in a thread while the vault's news may move what is mapped under it: a pool made by
    another is mapped after the canary under way has ended, even if whoever asked for it left."""
    active, standby = Rig(vault), Rig(vault, engine_id=1)
    memory = standby.engine.memory
    began, gate = threading.Event(), threading.Event()

    def hold_the_first(plan: StepPlan) -> None:
        if not began.is_set():
            began.set()
            assert gate.wait(BOUND_S)

    async with rigs(active, standby):
        await active.load()
        await standby.load()
        before = memory.pool.mapping
        on_launch(monkeypatch, hold_the_first)
        checking = asyncio.ensure_future(standby.engine.check())
        assert await asyncio.to_thread(began.wait, BOUND_S)
        checking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await checking
        assert memory.still.locked(), "the thread goes on, and what it reads must stay"
        await active.engine.wake(1)
        assert memory.pool.mapping is before
        gate.set()
        async with asyncio.timeout(BOUND_S):
            while memory.pool.mapping is before:
                await asyncio.sleep(0.01)
        assert await standby.engine.check() == ""


async def test_a_pool_that_came_later_finds_the_canarys_prompt_computed(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a standby made before there was a pool is good for every pool: nothing is made again, and its first step
    after taking over is one position of the canary, whose prompt nobody waits for."""
    plans: list[StepPlan] = []
    active, standby = Rig(vault, exact=False), Rig(vault, engine_id=1, exact=False)
    async with rigs(active, standby):
        await active.load()
        await standby.load()
        before = standby.ready
        await active.engine.wake(1)
        await standby.until_mapped(1)
        await active.engine.stop()
        await standby.engine.wake(2)
        on_launch(monkeypatch, plans.append)
        standby.engine.prove()
        await standby.run({1: request(prompt(20), 12)})
        assert plans[0].token_count == 1
        assert standby.ready is before
        assert not standby.heard("loading")
        assert not standby.heard("fatal")


def test_the_first_answer_counts(tmp_path: Path) -> None:
    """For its kind; another kind has its own."""
    path = answers_in(tmp_path)
    assert known_answer(path, "a", (1, 2)) == (1, 2)
    assert known_answer(path, "a", (3, 4)) == (1, 2)
    assert known_answer(path, "b", (3, 4)) == (3, 4)
    assert known_answer(path, "a", (1, 3), agrees=lambda written: written[0] == 1) == (1, 2)


def test_two_that_contradict_it_alike_withdraw_an_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One process does not, however often it asks; nor do two that say different things; and it is told."""
    path = answers_in(tmp_path)
    known_answer(path, "a", (1, 2), process="first")
    for process, tokens in (("x", (3, 4)), ("x", (3, 4)), ("y", (5, 6)), ("z", (3, 4))):
        assert known_answer(path, "a", tokens, process=process) == (1, 2)
    assert "withdrawn" not in caplog.text
    assert known_answer(path, "b", (3, 4), process="y") == (3, 4), "another kind"
    assert known_answer(path, "a", (3, 4), process="y") == (3, 4)
    assert "withdrawn, and theirs counts from now on (was (1, 2), is (3, 4))" in caplog.text
    assert known_answer(path, "a", (1, 2), process="first") == (3, 4)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": "b"}', b'{"a": [1.5]}', b"\xff\x00", b"[" * 100_000])
def test_a_file_of_something_else_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """And written again: it ends no engine."""
    path = answers_in(tmp_path)
    path.write_bytes(content)
    assert known_answer(path, "a", (1, 2)) == (1, 2)
    assert (tmp_path / "canaries.json.bad").read_bytes() == content
    assert known_answer(path, "a", (3, 4)) == (1, 2)
    assert "set aside" in caplog.text


def test_an_answer_that_cannot_be_kept_ends_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder in its place is set aside too; a disk that takes no more costs a warning, which names the file."""
    path = answers_in(tmp_path)
    path.mkdir()
    assert known_answer(path, "a", (1, 2)) == (1, 2)
    assert known_answer(tmp_path / "gone" / "canaries.json", "a", (1, 2)) == (1, 2)
    assert "could not be written" in caplog.text
    assert "gone/canaries.json" in caplog.text


def test_kinds_are_bounded(tmp_path: Path) -> None:
    """The oldest goes first."""
    path = answers_in(tmp_path)
    for number in range(KINDS_MAX + 1):
        known_answer(path, str(number), (number,))
    kept = json.loads(path.read_text())
    assert (len(kept), "0" in kept, str(KINDS_MAX) in kept) == (KINDS_MAX, False, True)


async def test_the_key_holds_all_that_can_change_the_answer(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another block size, another context or other code is another kind, so that none of them is called damaged."""
    for number, (code, settings) in enumerate([("x", {}), ("x", {"context_tokens_max": 64}), ("y", {})], 1):
        monkeypatch.setattr("holdfast.engines.torch.engine.code_identity", lambda code=code: code)
        r = Rig(vault, **settings)
        await r.load()
        await r.engine.stop()
        known = msgspec.json.decode(answers_in(vault.folder).read_bytes(), type=dict[str, list[int]])
        assert len(known) == number
        assert r.hosted.canary.known_from == str(answers_in(vault.folder))
    key = next(iter(known))
    how = ("float32", "exact, blocks of 16", "4096 positions", "1 ranks", "streams", "steps of ", "Holdfast ", "code x")
    for part in (*how, "cpu, torch ", cpu_model(), "1 threads"):
        assert part in key
    assert len(code_identity()) == 16


async def test_a_damaged_file_keeps_no_engine_from_starting(vault: Vault) -> None:
    """It is set aside. An answer that was changed costs one engine its start; the second with the same answer withdraws
    it. An engine that was right before does not ask the file again."""
    path = answers_in(vault.folder)
    path.write_text("{")
    first, second, third = Rig(vault), Rig(vault, engine_id=1), Rig(vault, engine_id=1)
    async with rigs(first, second, third):
        await first.load()
        assert path.with_name("canaries.json.bad").read_text() == "{"
        known = json.loads(path.read_text())
        path.write_text(json.dumps({kind: [token + 1 for token in tokens] for kind, tokens in known.items()}))
        assert await first.engine.check() == ""
        await second.load()
        assert "canaries.json has another" in await second.engine.check()
        notes = path.with_name("canaries.against.json")
        (dissent,) = json.loads(notes.read_text()).values()
        notes.write_text(json.dumps({kind: dissent | {"process": "an earlier one"} for kind in known}))
        await third.load()
        assert await third.engine.check() == ""
        assert json.loads(path.read_text()) == known


async def test_a_takeover_waits_for_one_step_of_a_check(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is killed while the standby checks itself: the check is dropped after the step under way, its last
    outcome stands, and the next step is the new leader's."""
    plans: list[StepPlan] = []
    began, gate = threading.Event(), threading.Event()

    def heard(plan: StepPlan) -> None:
        plans.append(plan)
        if not began.is_set():
            began.set()
            assert gate.wait(BOUND_S)

    standby = Rig(vault, engine_id=1)
    try:
        async with vault.engine(0, kind="torch") as owner:
            await owner.do("wake", epoch=1)
            await standby.load()
            await standby.until_mapped(1)
            on_launch(monkeypatch, heard)
            checking = asyncio.ensure_future(standby.engine.check())
            assert await asyncio.to_thread(began.wait, BOUND_S)
            await owner.kill()
            async with asyncio.timeout(BOUND_S):
                while not standby.heard("owner_gone"):
                    await asyncio.sleep(0.01)
                gate.set()
                assert await checking == ""
            assert len(plans) == 1, "the check went on"
            await standby.engine.wake(2)
            standby.engine.prove()
            await standby.run({1: request(prompt(20), 12)})
            assert len(standby.tokens(1)) == 12
            assert not standby.heard("disproved")
            assert await standby.engine.check() == "", "a later check is not dropped"
    finally:
        gate.set()
        await standby.engine.stop()
