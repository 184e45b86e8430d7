"""A reader of large bodies is given up when it cannot answer, and never for being slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.core.procfs import ThreadTimes
from holdfast.frontend.large_bodies import CPU_S, IDLE_LOOKS, STOPPED_LOOKS, ReaderProgress

SECOND = 10**9


def looks_until_given_up(looks: Iterator[tuple[bool, ThreadTimes | None]], body_bytes: int = 0) -> tuple[int, str]:
    """How many looks it took, and the verdict; 1000 without one are enough."""
    progress = ReaderProgress(body_bytes)
    for count, (stopped, times) in zip(range(1, 1001), looks, strict=False):
        if verdict := progress.check(stopped, times):
            return count, verdict
    return 1000, ""


def test_one_that_is_stopped_is_given_up_soon() -> None:
    """After looks in a row only: one that was let run again is spared."""
    frozen = ThreadTimes("T", 5, 5)
    assert looks_until_given_up((True, frozen) for _ in range(1000)) == (STOPPED_LOOKS, "stopped")
    assert looks_until_given_up((bool(n % STOPPED_LOOKS), None) for n in range(1000)) == (1000, "")


def test_one_that_sleeps_over_its_work_is_given_up() -> None:
    """It neither runs nor wants to; where the kernel keeps no times nobody can tell."""
    assert looks_until_given_up((False, ThreadTimes("S", 5, 5)) for _ in range(1000)) == (IDLE_LOOKS + 1, "stuck")
    assert looks_until_given_up((False, None) for _ in range(1000)) == (1000, "")


@pytest.mark.parametrize("mib", [0, 16])
def test_one_that_spins_is_given_up_by_its_cpu_time(mib: int) -> None:
    """A larger body is given more, in proportion."""
    spinning = ((False, ThreadTimes("R", n * SECOND, 0)) for n in range(1000))
    count, verdict = looks_until_given_up(spinning, mib * 2**20)
    assert (count, verdict) == (CPU_S + mib + 2, "stuck")


@pytest.mark.parametrize("state", ["R", "S", "D"])
def test_one_that_waits_for_the_machine_is_not_given_up(state: str) -> None:
    """In line for a CPU, or for a disk that swaps."""
    grows = 0 if state == "D" else SECOND
    assert looks_until_given_up((False, ThreadTimes(state, 0, n * grows)) for n in range(1000)) == (1000, "")
