"""Defines the settings of control: health checks, service level objectives, degradation, and spare workers.

`holdfast run control` has an option for every field unless the field names other commands; `holdfast up` has those of
`HealthSettings` and `SloSettings`.
"""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about
from holdfast.spec.waits import HoldSettings

_BOTH = ("up", "control")
_ALONE = ("control",)
# A check takes one place in a batch, not the whole device. With this share a check of 1.5 s still runs every 30 s. With
# checks of 2 s, wrong answers are detected within 60 s: 40 s to the next check, a fifth more for jitter, three tries
# with their pauses, and a check of another worker.
CANARY_SHARE = 0.05
# More spares than serving workers are a typing mistake.
_SPARES = (r"\d{1,3}|[0-4]?\d%|50%", "a number, or a share up to 50%")


class HealthSettings(Settings, frozen=True):
    """Settings of control's health checks."""

    canary_interval_s: Annotated[
        float,
        about("Minimum time between canary checks (known-answer requests) of a worker.", "s", over=0, expert=("up",)),
    ] = 30.0
    canary_share: Annotated[
        float,
        about("Maximum fraction of a worker's time used by canary checks; slow checks run less often.", over=0, max=1),
    ] = CANARY_SHARE
    # Finds GPU faults on the machine where control runs.
    kernel_log: Annotated[str, about("Kernel log to read for GPU faults (empty: not read).")] = "/dev/kmsg"
    nvml: Annotated[str, about("NVIDIA management library (NVML) to query for GPU faults (empty: not queried).")] = (
        "libnvidia-ml.so.1"
    )
    breaker_failures: Annotated[
        int, about("Consecutive failures that open a worker's circuit breaker.", min=1, max=1000)
    ] = 3
    breaker_open_s: Annotated[
        float,
        about("Time a breaker stays open before canaries test its worker; longer if it opens again soon.", "s", over=0),
    ] = 60.0
    breaker_canaries: Annotated[
        int, about("Number of canaries a worker must pass to close its breaker.", min=1, max=100)
    ] = 1


class SloSettings(Settings, frozen=True):
    """Service level objectives of the undegraded deployment. A rate of 0 is derived from the other rate."""

    ttft_ms: Annotated[float, about("SLO: time to the first token.", "ms", over=0)] = 500.0
    tpot_ms: Annotated[float, about("SLO: time per further token.", "ms", over=0)] = 50.0
    requests_per_s: Annotated[float, about("SLO: requests per second, all workers together (0: none).", min=0)] = 0.0
    tokens_per_s: Annotated[float, about("SLO: tokens per second, all workers together (0: none).", min=0)] = 0.0
    workers: Annotated[
        int,
        about("Number of workers, with spares, that meet the SLO (0: the most seen at once).", min=0, commands=_ALONE),
    ] = 0


class DegradationSettings(Settings, frozen=True):
    """Settings for how long a change of capacity must last before the degradation level changes."""

    fall_s: Annotated[
        float,
        about(
            "Time that capacity must be clearly below a threshold before the degradation level gets worse.", "s", min=0
        ),
    ] = 2.0
    fall_near_s: Annotated[
        float,
        about("Time that capacity must be just below a threshold before the degradation level gets worse.", "s", min=0),
    ] = 30.0
    return_s: Annotated[
        float,
        about(
            "Time that capacity must be clearly above a threshold before the degradation level gets better.", "s", min=0
        ),
    ] = 10.0
    return_near_s: Annotated[
        float,
        about(
            "Time that capacity must be at or just above a threshold before the degradation level gets better.",
            "s",
            min=0,
        ),
    ] = 30.0
    band: Annotated[
        float,
        about("Distance from a threshold that counts as near, as a fraction of the SLO.", min=0, max=0.12, commands=()),
    ] = 0.05
    flap_s: Annotated[
        float,
        about(
            "If the level gets worse this soon after it got better, the next recovery takes twice as long.", "s", min=0
        ),
    ] = 300.0
    # Of the level, not of streams: those wait for `HoldSettings.hold_s`, from which `spec.plan` sets this one.
    hold_s: Annotated[
        float,
        about(
            "Time without any worker before new requests are refused; should equal the frontends' --hold-s.", "s", min=0
        ),
    ] = HoldSettings().hold_s
    start_up_s: Annotated[
        float,
        about(
            "Time after the first worker's start in which workers still to come are not counted as missing.", "s", min=0
        ),
    ] = 120.0


class SpareSettings(Settings, frozen=True):
    """Settings for how many healthy workers are kept without traffic."""

    spares: Annotated[
        str,
        about("Workers of each model kept in reserve: a number, or a percentage (10%), rounded down.", like=_SPARES),
    ] = "0"
    # Longer than the probation of a recovered worker plus a canary's interval.
    settle_s: Annotated[
        float, about("Time that all must be well before a worker goes back into reserve.", "s", min=0, commands=())
    ] = 60.0

    def of(self, workers: int) -> int:
        """Return the number of spares among `workers`; at least one worker always serves."""
        share, is_share = self.spares.removesuffix("%"), self.spares.endswith("%")
        wanted = workers * int(share) // 100 if is_share else int(share)
        return max(0, min(wanted, workers - 1))


class LevelSettings(Settings, frozen=True):
    """Settings of control for degradation levels and spares."""

    slo: Annotated[
        SloSettings, about("Service level objectives (SLO).", prefix="slo-", commands=_BOTH, expert=("up",))
    ] = SloSettings()
    times: Annotated[
        DegradationSettings, about("When the degradation level changes.", prefix="level-", commands=_ALONE)
    ] = DegradationSettings()
    reserve: Annotated[SpareSettings, about("Workers kept in reserve.", commands=_BOTH, expert=("up",))] = (
        SpareSettings()
    )
