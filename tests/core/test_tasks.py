"""Tasks beside their owner: kept, told of when they fail, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging

import pytest

from holdfast.core import tasks
from holdfast.core.tasks import Tasks, beside, done_before, done_within, true_within


async def fail() -> None:
    raise ValueError("as arranged")


def test_a_task_that_nobody_refers_to_runs_to_its_end() -> None:
    """The loop keeps weak references only; the owner's group keeps the strong one, and forgets it at the end."""

    async def case() -> None:
        owner = Tasks("owner")
        go, went = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await go.wait()
            went.set()

        owner.spawn(work(), "work")
        await asyncio.sleep(0)
        gc.collect()
        assert repr(owner) == "owner: work"
        go.set()
        await went.wait()
        await asyncio.sleep(0)
        assert repr(owner) == "owner: nothing runs"

    asyncio.run(case())


def test_a_failure_is_logged_by_name_and_handed_on_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever owns the task hears of its error; being cancelled is no error."""
    heard: list[BaseException] = []

    async def case() -> None:
        owner = Tasks("owner", heard.append)
        failing = owner.spawn(fail(), "failing")
        owner.spawn(asyncio.Event().wait(), "waiting")
        await asyncio.wait([failing])
        await owner.stop()

    asyncio.run(case())
    assert [str(error) for error in heard] == ["as arranged"]
    assert "owner: failing failed" in caplog.text
    assert "waiting" not in caplog.text


def test_a_task_that_does_not_end_is_named_and_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner's end never hangs on a task that holds on to its life."""
    monkeypatch.setattr(tasks, "STOP_S", 0.01)

    async def case() -> None:
        owner = Tasks("owner")
        over = asyncio.Event()

        async def stubborn() -> None:
            while not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()

        task = owner.spawn(stubborn(), "stubborn")
        await asyncio.sleep(0)
        await owner.stop()
        assert not task.done()
        over.set()
        await task

    with caplog.at_level(logging.ERROR):
        asyncio.run(case())
    assert "owner: stubborn did not end" in caplog.text


def test_what_runs_beside_a_body_ends_with_it() -> None:
    """However the body ends; and an event that comes first cancels the work, an error of the work is the caller's."""

    async def case() -> None:
        with pytest.raises(RuntimeError):
            async with beside(asyncio.Event().wait(), "work") as task:
                raise RuntimeError
        assert task.cancelled()
        over = asyncio.Event()
        with pytest.raises(ValueError):
            await done_before(over, fail(), "failing")
        assert await done_before(over, asyncio.sleep(0), "short")
        over.set()
        assert not await done_before(over, asyncio.sleep(3600), "long")

    asyncio.run(case())


async def test_work_is_done_within_its_bound_or_cancelled() -> None:
    """Work that is not done in time is cancelled, and its caller knows."""
    event = asyncio.Event()
    assert not await done_within(event.wait(), 0.01)
    event.set()
    assert await done_within(event.wait(), 0.01)
    assert await done_within(event.wait(), None)


async def test_a_condition_is_looked_at_until_it_holds_or_its_bound_has_passed() -> None:
    """A condition is polled until it holds or the bound has passed."""
    looks = iter((False, False, True))
    assert await true_within(lambda: next(looks), 30.0, 0.001)
    assert not await true_within(lambda: False, 0.01, 0.001)
