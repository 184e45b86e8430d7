"""Starts, breaks and watches deployments, for tests, benchmarks and proofs: ours and those of other projects.

The names in `__all__` are stable (docs/testing.md); everything else in this package may change.
"""

from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import Stream
from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import freeze, kill_group
from holdfast.testing.rig import EngineSeen
from holdfast.testing.supervised import Supervised
from holdfast.testing.workload import Workload, compare, hit_in_the_middle, run_streams

__all__ = [
    "Answer",
    "Deployment",
    "EngineSeen",
    "Stream",
    "Supervised",
    "Workload",
    "compare",
    "difference",
    "freeze",
    "hit_in_the_middle",
    "kill_group",
    "run_streams",
]
