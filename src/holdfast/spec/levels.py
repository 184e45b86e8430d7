"""What a deployment promises, how patient it is before it degrades, and what it keeps in reserve.

Always true: what is promised is a number above nothing, or it is not promised.
"""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about

_BOTH = ("up", "control")
_ALONE = ("control",)
_PANEL = {"panel": "Health"}
# More in reserve than at work is a typing mistake.
_SPARES = (r"\d{1,3}|[0-4]?\d%|50%", "a number, or a share up to 50%")


class SloSettings(Settings, frozen=True):
    """What the deployment promises, undegraded. A rate that is not promised follows from the other."""

    ttft_ms: Annotated[float, about("SLO: time to the first token.", "ms", over=0, commands=_BOTH)] = 500.0
    tpot_ms: Annotated[float, about("SLO: time per further token.", "ms", over=0, commands=_BOTH)] = 50.0
    requests_per_s: Annotated[
        float, about("SLO: requests per second, all workers together (0: none).", min=0, commands=_BOTH)
    ] = 0.0
    tokens_per_s: Annotated[
        float, about("SLO: tokens per second, all workers together (0: none).", min=0, commands=_BOTH)
    ] = 0.0
    workers: Annotated[
        int,
        about("Number of workers, with spares, that meet the SLO (0: the most seen at once).", min=0, commands=_ALONE),
    ] = 0


class DegradationSettings(Settings, frozen=True):
    """How long what is seen must last before the level follows."""

    fall_s: Annotated[
        float,
        about(
            "Time that capacity must be clearly below a threshold before the degradation level gets worse.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 2.0
    fall_near_s: Annotated[
        float,
        about(
            "Time that capacity must be just below a threshold before the degradation level gets worse.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 30.0
    return_s: Annotated[
        float,
        about(
            "Time that capacity must be clearly above a threshold before the degradation level gets better.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 10.0
    return_near_s: Annotated[
        float,
        about(
            "Time that capacity must be at or just above a threshold before the degradation level gets better.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 30.0
    band: Annotated[
        float, about("Distance from a threshold that counts as near, as a fraction of the SLO.", min=0, max=0.12)
    ] = 0.05
    flap_s: Annotated[
        float,
        about(
            "If the level gets worse this soon after it got better, the next recovery takes twice as long.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 300.0
    hold_s: Annotated[
        float,
        about(
            "Time without any worker before new requests are refused; should equal the frontends' --hold-s.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 30.0
    start_up_s: Annotated[
        float,
        about(
            "Time after the first worker's start in which workers still to come are not counted as missing.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 120.0


class SpareSettings(Settings, frozen=True):
    """How many sound workers are kept without traffic."""

    spares: Annotated[
        str,
        about(
            "Workers of each model kept in reserve: a number, or a percentage (10%), rounded down.",
            like=_SPARES,
            commands=_BOTH,
        ),
    ] = "0"
    # Longer than a worker that came back needs to show whether it stays (its proving, and a canary's interval).
    settle_s: Annotated[
        float, about("Time that all must be well before a worker goes back into reserve.", "s", min=0)
    ] = 60.0

    def of(self, workers: int) -> int:
        """How many, of so many workers: at least one always serves."""
        share, is_share = self.spares.removesuffix("%"), self.spares.endswith("%")
        wanted = workers * int(share) // 100 if is_share else int(share)
        return max(0, min(wanted, workers - 1))


class LevelSettings(Settings, frozen=True):
    """What whoever decides on levels and spares is told."""

    slo: Annotated[SloSettings, about("Service level objectives (SLO).", prefix="slo-", **_PANEL)] = SloSettings()
    times: Annotated[DegradationSettings, about("When the degradation level changes.", prefix="level-", **_PANEL)] = (
        DegradationSettings()
    )
    reserve: Annotated[SpareSettings, about("Workers kept in reserve.", **_PANEL)] = SpareSettings()
