"""Control's verdict on a worker, as a rollout sees it. Pure.

Always true: trouble is what no waiting mends and what may be the revision's fault. A device that is lost, a worker that
is slow, silent or out of reach, or one that nobody has checked yet, only does not count. A spare counts: it is sound,
and kept without traffic on purpose.
"""

from __future__ import annotations

from msgspec import structs

from holdfast.health.records import HealthRecord
from holdfast.health.standing import HealthCause, WorkerStanding
from holdfast.rollout.replica import ObservedReplica, ReplicaStage

# What is held against a worker and undoes the revision that brought it, in words that read after its name.
PERMANENT_FAULTS = {
    HealthCause.WRONG: "answers wrongly",
    HealthCause.CANARY_FAILING: "fails its canaries",
    HealthCause.ENGINE: "says that its engine cannot go on",
}
UNCHECKED = "control has not checked it yet"


def with_verdict(seen: ObservedReplica, record: HealthRecord | None, refused: str = "") -> ObservedReplica:
    """A worker of which all else is said, with what control wrote of it, and why a frontend refuses its card."""
    standing = record.standing if record is not None else WorkerStanding(reason=UNCHECKED)
    causes, weight = standing.causes, standing.weight
    trouble = next((f"{words}: {causes[cause]}" for cause, words in PERMANENT_FAULTS.items() if cause in causes), "")
    if refused:
        trouble = f"has a card that is refused: {refused}"
    how = seen.how or (standing.reason if seen.stage is ReplicaStage.SERVING and weight < 1.0 else "")
    is_shut = HealthCause.BREAKER in causes
    return structs.replace(seen, weight=weight, trouble=seen.trouble or trouble, is_shut=is_shut, how=how)
