"""The frontend bench and the latency benches run and keep their bounds.

What else runs on the machine only ever adds to a figure, so the least of some tries is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from bench.data_path.latency import first_token, long_prompt

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(120)]


def _bench(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "holdfast", "bench", "frontend", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=90, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


TRIES = 5


def _kept(bound: float, measure: Callable[[], float]) -> bool:
    return any(measure() <= bound for _ in range(TRIES))


def test_cost_at_full_speed() -> None:
    """32 streams at full speed cost at most 12 ms of CPU per 1,000 tokens."""
    assert _kept(12, lambda: _bench("--streams", "32", "--requests", "320")["cpu_ms_per_1k_tokens"])


def test_cost_when_paced() -> None:
    """64 streams of one token every 10 ms cost at most 32 ms per 1,000 tokens."""
    assert _kept(32, lambda: _bench("--streams", "64", "--pace-ms", "10", "--requests", "192")["cpu_ms_per_1k_tokens"])


def test_first_token_and_long_prompts() -> None:
    """The frontend adds little to the first token, and a 30,000-token prompt delays nobody's next one for long: by no
    more than 20 ms, or than a busy machine itself delays one in the same run."""
    assert _kept(3.0, lambda: first_token(60)["ttft_added_ms_p50"])

    def over_the_machines_own() -> float:
        row = long_prompt(streams=16, tokens=100, rounds=1)
        return float(row["delay_ms"] - max(20.0, row["worst_gap_ms_calm"]))

    assert _kept(0, over_the_machines_own)
