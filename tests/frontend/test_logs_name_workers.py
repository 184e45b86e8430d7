"""A frontend's log speaks of workers as `holdfast ps` does, and says on which day."""

from __future__ import annotations

import os
import re
import signal

from holdfast.testing.deployment import Deployment


def test_a_workers_coming_and_going_is_logged_by_its_name() -> None:
    """Joined, then killed: both lines have the name that it was started under, and begin with a date."""
    with Deployment(workers=1, sim={"ttft_ms": 0.0}) as deployment:
        (name,) = deployment.worker_names
        assert deployment.health()["workers"][0]["name"] == name
        os.kill(deployment.pid(name), signal.SIGKILL)
        left = f"{name} left: "
        deployment.wait_until(lambda: left in deployment.log("frontend"), "the worker's end to be logged", 20)
        lines = [line for line in deployment.log("frontend").splitlines() if name in line]
    assert any(f" {name} of holdfast-sim " in line for line in lines)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line) for line in lines)
