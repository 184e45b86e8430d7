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
        float, about("Between two checks of a worker with a known question, at least.", "s", over=0, commands=_BOTH)
    ] = 30.0
    canary_share: Annotated[
        float,
        about(
            "Upper bound on the share of a worker's time that checks take; where they would take more, they come less "
            "often.",
            over=0,
            max=1,
            commands=_BOTH,
        ),
    ] = CANARY_SHARE
    # Faults of the GPUs of the machine that control runs on.
    kernel_log: Annotated[
        str, about("The kernel's log, where drivers tell of GPUs' faults; empty: it is not read.", commands=_BOTH)
    ] = "/dev/kmsg"
    nvml: Annotated[
        str,
        about("NVIDIA's management library, which tells of them too; empty: it is not asked.", commands=_BOTH),
    ] = "libnvidia-ml.so.1"
    breaker_failures: Annotated[
        int, about("Failures of a worker in a row that open its breaker.", min=1, max=1000, commands=_BOTH)
    ] = 3
    breaker_open_s: Annotated[
        float, about("How long a breaker stays open before canaries try its worker.", "s", over=0, commands=_BOTH)
    ] = 60.0
    breaker_canaries: Annotated[
        int, about("Canaries that a worker must pass for its breaker to close.", min=1, max=100, commands=_BOTH)
    ] = 1
