"""How a process is asked whether it lives and is ready."""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about


class Probes(Settings, frozen=True):
    """How a process is asked; the defaults are a kubelet's, but for a startup bound that a large model can keep."""

    # A second is what people notice.
    period_s: Annotated[float, about("Time between probes.", "s", over=0)] = 1.0
    # One may be a moment between two states.
    failure_threshold: Annotated[int, about("Consecutive failures after which the probe counts as failed.", min=1)] = 3
    # A cold 8B engine needs 32 s (facts 9).
    startup_s: Annotated[float, about("Time limit from start to ready.", "s", min=0)] = 120.0
    timeout_s: Annotated[
        float, about("Time limit for an answer; a probe without an answer does not count.", "s", over=0)
    ] = 1.0
