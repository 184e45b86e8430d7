"""What `holdfast get` says of a deployment, by what its supervisor reports."""

from __future__ import annotations

import pytest

from holdfast.cli.deployments.book import Seen
from holdfast.cli.deployments.words import row, state_of
from holdfast.rollout import machine
from holdfast.rollout.records import DesiredDeployment, RolloutStatus
from holdfast.rollout.status import RolloutReport, RolloutResult, ServiceStatus

REPLACED = "worker-1 is being replaced: its canaries fail"


def service(*, new: int = 1, there: int = 1, replacing: str = "", is_unwell: bool = False) -> ServiceStatus:
    return ServiceStatus("worker", 1, new, 0, there, is_unwell=is_unwell, replacing=replacing)


@pytest.mark.parametrize(
    ("one", "state"),
    [
        (service(), "in place"),
        (service(there=2, replacing=REPLACED), "replacing"),  # another is being started
        (service(replacing=REPLACED), "replacing"),  # there is no room for one
        (service(new=0, replacing=REPLACED, is_unwell=True), "unwell"),
        (service(there=2), "rolling out"),
    ],
)
def test_the_state_of_a_deployment_that_is_in_place(one: ServiceStatus, state: str) -> None:
    """A replica that is replaced for its health is named before one that only comes."""
    report = RolloutReport(RolloutResult.DONE, 1, "as it is", (one,))
    status = RolloutStatus(pid=1, host="here", state_dir="/s", serial=1, report=report)
    wanted = DesiredDeployment(manifest="", revision=1, digest="", serial=1)
    seen = Seen("chat", wanted, machine.NOTHING, status, ())
    assert state_of(seen) == state
    assert row(seen, 0.0)[2][0] == state
