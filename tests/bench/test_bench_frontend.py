"""The frontend bench and the latency benches run and keep their bounds with room for a busy machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from holdfast.bench.latency import first_token, long_prompt

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(120)]


def _bench(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "holdfast", "bench", "frontend", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=90, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def test_cost_at_full_speed() -> None:
    """32 streams at full speed cost at most 12 ms of CPU per 1,000 tokens (with a quarter more for a busy machine)."""
    result = _bench("--streams", "32", "--requests", "320")
    assert result["cpu_ms_per_1k_tokens"] <= 15, result
    assert {"ttft_ms_p50", "tokens_per_s", "tokens_per_write"} <= set(result)


def test_cost_when_paced() -> None:
    """64 streams of one token every 10 ms cost at most 32 ms per 1,000 tokens (and a quarter)."""
    result = _bench("--streams", "64", "--pace-ms", "10", "--requests", "192")
    assert result["cpu_ms_per_1k_tokens"] <= 40, result


def test_first_token_and_long_prompts() -> None:
    """The frontend adds little to the first token, and a 30,000-token prompt delays nobody's next one for long."""
    added = first_token(60)
    assert added["ttft_added_ms_p50"] <= 3.0, added
    delayed = long_prompt(streams=16, tokens=100, rounds=1)
    assert delayed["delay_ms"] <= 40, delayed
