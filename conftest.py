"""One deployment of real processes for all tests that only talk to it; whoever kills things starts one of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from holdfast.testing.deployment import Deployment

# A shell script starts what it puts in the background with SIGINT ignored, and children inherit that (facts 40): tests
# that send Ctrl-C mean the usual.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


@pytest.fixture(scope="session")
def deployment() -> Iterator[Deployment]:
    """A store, one quick worker and a frontend with small bounds, which can be reached, but not by a pause."""
    with Deployment(
        workers=1,
        sim={"ttft_ms": 5, "tpot_ms": 1},
        frontend={"body_bytes_max": 1024 * 1024, "request_s": 6.0, "unread_s": 12.0},
    ) as started:
        yield started
