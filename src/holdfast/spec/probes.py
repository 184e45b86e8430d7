"""How a process is asked whether it lives and is ready."""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about


class Probes(Settings, frozen=True):
    """How a process is asked; the defaults are a kubelet's, but for a startup bound that a large model can keep."""

    # A second is what people notice.
    period_s: Annotated[float, about("Between two questions.", "s", over=0)] = 1.0
    # One may be a moment between two states.
    failure_threshold: Annotated[int, about("Refusals in a row that count.", min=1)] = 3
    # A cold 8B engine needs 32 s (facts 9).
    startup_s: Annotated[float, about("From its start until it is ready.", "s", min=0)] = 120.0
    timeout_s: Annotated[float, about("For an answer; past it the question counts as not asked.", "s", over=0)] = 1.0
