"""A frontend that must end before its answers have ended says so, by name."""

from __future__ import annotations

import asyncio
import signal

import pytest

from holdfast.testing.clients import ask, chat_body, read_answer
from holdfast.testing.deployment import Deployment

pytestmark = pytest.mark.processes


async def test_drain_that_runs_out_ends_streams_with_an_error_event() -> None:
    """An open stream gets an error event and no [DONE], never a silent close; the frontend exits with 0."""
    with Deployment(workers=1, frontend={"drain_s": 0.3}) as deployment:
        streaming = asyncio.ensure_future(ask(deployment.port, "/v1/chat/completions", chat_body("long", 5000)))
        busy = lambda: deployment.worker_facts("worker-0")["tokens_total"] > 3  # noqa: E731
        await asyncio.to_thread(deployment.wait_until, busy, "the stream to be under way")
        deployment.signal("frontend", signal.SIGTERM)
        answer = read_answer(await asyncio.wait_for(streaming, 10))
        assert answer.error is not None
        assert "shutting down" in answer.error["message"]
        assert not answer.done
        assert await asyncio.to_thread(deployment.processes["frontend"].wait, 10) == 0
