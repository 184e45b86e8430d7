"""A manifest whose planner is removed, with real processes: the supervisor's own control judges from then on."""

from __future__ import annotations

import pytest

from holdfast.rollout.machine import RolloutPhase
from tests.rigs.roles.kept_manifest import Kept

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(300)]
PLANNER = "    Planner: {componentType: planner}\n"
MANIFEST = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: judged}
spec:
  services:
    Frontend: {componentType: frontend}
    Worker:
      componentType: worker
      replicas: 2  # with one of each set control could not tell which of them is right
      modelName: holdfast-sim
      extraPodSpec: {mainContainer: {args: [--engine, sim, --sim-tpot-ms, "5"ARGS]}}
"""
GOOD, BAD = MANIFEST.replace("ARGS", ""), MANIFEST.replace("ARGS", ", --sim-fault, wrong_tokens")


def controls(site: Kept) -> set[str]:
    return {name for name, slot in site.supervisor.slots.items() if slot.job.role == "control"}


async def test_a_bad_change_is_undone_after_the_planner_was_removed() -> None:
    """The planner judges as long as the manifest has one, then the supervisor's control does, and a set that answers
    wrongly is undone; a planner that is added again takes over from the supervisor's control."""
    with Kept() as site:
        async with site.kept(GOOD + PLANNER) as rolling:
            await site.in_place(rolling, 1)
            (planner,) = controls(site)
            assert planner.startswith("judged-planner-")
            await site.apply(rolling, GOOD)
            await site.in_place(rolling, 2)
            await site.apply(rolling, BAD)
            await site.until(
                lambda: rolling.state.desired_number == 3 and rolling.state.phase is RolloutPhase.STEADY, "a verdict"
            )
            assert rolling.state.undone == 3, site.told
            assert "answers wrongly" in rolling.state.why
            assert controls(site) == {"judged-control"}
            await site.apply(rolling, GOOD + PLANNER)
            await site.in_place(rolling, 4)
            await site.until(lambda: "judged-control" not in controls(site), "the supervisor's control to leave")
            assert len(controls(site)) == 1
