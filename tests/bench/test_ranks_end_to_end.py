"""`holdfast up --ranks 2`: one rank's process is killed under streams, and every client gets what it would have got."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.testing.processes import children_of
from holdfast.testing.supervised import Supervised

pytest.importorskip("torch", reason="torch is not installed here")

STREAMS = 4
TOKENS = 150
KILL_AFTER = 20  # chunks of the first stream
WAIT_S = 60.0
# Every rank of both engines imports torch, two seconds of a core each, beside whatever else the machine does.
START_S = 150.0


def answer(port: int, number: int, far: threading.Event) -> tuple[str, dict[str, Any]]:
    """One stream's text, and what its last chunk says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    body = {"model": "tiny", "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "seed": number}
    body |= {"prompt": f"stream {number} " * (1 + 9 * number), "temperature": 0.8 if number % 2 else 0.0}
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body | {"stream_options": {"include_usage": True}}),
            {"content-type": "application/json"},
        )
        chunks = []
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
                if len(chunks) == KILL_AFTER:
                    far.set()
    finally:
        connection.close()
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), chunks[-1]


def answers(port: int, far: threading.Event, then: Any = None) -> list[tuple[str, dict[str, Any]]]:
    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [pool.submit(answer, port, number, far) for number in range(STREAMS)]
        if then is not None:
            assert far.wait(WAIT_S)
            then()
        return [each.result(WAIT_S) for each in asked]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_rank_is_not_noticed_by_clients() -> None:
    """SIGKILL the active engine's second rank: its engine ends, the standby group goes on with every stream, the texts
    are those of the unbroken run, and redundancy comes back."""
    options = ("--engine", "torch", "--model", "tiny", "--exact", "--ranks", "2", "--kv-gib", "0.05")
    with Supervised(*options, "--torch-threads", "1", start_s=START_S) as up:
        unbroken = answers(up.port, threading.Event())
        active = up.active().pid
        (rank,) = [pid for pid, words in children_of(active).items() if "holdfast.engines.torch.ranks.rank" in words]
        broken = answers(up.port, threading.Event(), lambda: os.kill(rank, signal.SIGKILL))
        assert [text for text, _ in broken] == [text for text, _ in unbroken], up.logs()
        assert all(last["usage"]["completion_tokens"] == TOKENS for _, last in broken)
        assert sum(last["holdfast"]["resumed"] for _, last in broken) >= 1, "the kill came too late to mean anything"
        up.wait_restored(active, START_S)
        assert not children_of(active)
