"""`holdfast up --ranks 2`: one rank's process is killed under streams, and every client gets what it would have got."""

from __future__ import annotations

import os
import signal

import pytest

from holdfast.testing.answers import difference
from holdfast.testing.clients import Stream
from holdfast.testing.processes import children_of
from holdfast.testing.supervised import Supervised

pytest.importorskip("torch", reason="torch is not installed here")

STREAMS = 4
TOKENS = 150
KILL_AFTER = 20  # pieces of the first stream
# Every rank of both engines imports torch, two seconds of a core each, beside whatever else the machine does.
START_S = 150.0


def asked(port: int) -> list[Stream]:
    more = {"model": "tiny", "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    varied = [
        {"seed": number, "prompt": f"stream {number} " * (1 + 9 * number), "temperature": 0.8 if number % 2 else 0.0}
        for number in range(STREAMS)
    ]
    return [Stream(port, more | each, "/v1/completions") for each in varied]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_rank_is_not_noticed_by_clients() -> None:
    """SIGKILL the active engine's second rank: its engine ends, the standby group goes on with every stream, the texts
    are those of the unbroken run, and redundancy comes back."""
    options = ("--engine", "torch", "--model", "tiny", "--exact", "--ranks", "2", "--kv-gib", "0.05")
    with Supervised(*options, "--torch-threads", "1", start_s=START_S) as up:
        unbroken = [stream.answer() for stream in asked(up.port)]
        active = up.active().pid
        (rank,) = [pid for pid, words in children_of(active).items() if "holdfast.engines.torch.ranks.rank" in words]
        streams = asked(up.port)
        streams[0].wait_tokens(KILL_AFTER)
        os.kill(rank, signal.SIGKILL)
        broken = [stream.answer() for stream in streams]
        differences = [difference(right, got) for right, got in zip(unbroken, broken, strict=True)]
        assert differences == [""] * STREAMS, up.logs()
        assert all(len(answer.tokens) == TOKENS for answer in broken)
        assert sum(answer.resumed for answer in broken) >= 1, "the kill came too late to mean anything"
        up.wait_restored(active, START_S)
        assert not children_of(active)
