"""How workers are judged, as a person may set it: canaries and breakers."""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about

_BOTH = ("up", "control")
# A check takes one place of a batch, not the device. With this share one of 1.5 s still comes every 30 s, and a worker
# whose check takes 2 s is found wrong within 60 s: 40 s to the next check, a fifth more by chance, three tries with
# their pauses, and one of the others.
CANARY_SHARE = 0.05


class HealthSettings(Settings, frozen=True):
    """What of control's judgement a person may set; the rest follows from what workers do."""

    canary_interval_s: Annotated[
        float,
        about("Minimum time between canary checks (known-answer requests) of a worker.", "s", over=0, commands=_BOTH),
    ] = 30.0
    canary_share: Annotated[
        float,
        about(
            "Maximum fraction of a worker's time used by canary checks; slow checks run less often.",
            over=0,
            max=1,
            commands=_BOTH,
        ),
    ] = CANARY_SHARE
    # Faults of the GPUs of the machine that control runs on.
    kernel_log: Annotated[str, about("Kernel log to read for GPU faults (empty: not read).", commands=_BOTH)] = (
        "/dev/kmsg"
    )
    nvml: Annotated[
        str,
        about("NVIDIA management library (NVML) to query for GPU faults (empty: not queried).", commands=_BOTH),
    ] = "libnvidia-ml.so.1"
    breaker_failures: Annotated[
        int, about("Consecutive failures that open a worker's circuit breaker.", min=1, max=1000, commands=_BOTH)
    ] = 3
    breaker_open_s: Annotated[
        float,
        about(
            "Time a breaker stays open before canaries test its worker; longer if it opens again soon.",
            "s",
            over=0,
            commands=_BOTH,
        ),
    ] = 60.0
    breaker_canaries: Annotated[
        int, about("Number of canaries a worker must pass to close its breaker.", min=1, max=100, commands=_BOTH)
    ] = 1
