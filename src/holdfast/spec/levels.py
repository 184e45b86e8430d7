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

    ttft_ms: Annotated[float, about("Promised time to the first token.", "ms", over=0, commands=_BOTH)] = 500.0
    tpot_ms: Annotated[float, about("Promised time for each further token.", "ms", over=0, commands=_BOTH)] = 50.0
    requests_per_s: Annotated[
        float, about("Promised requests per second, all workers together; 0: none.", min=0, commands=_BOTH)
    ] = 0.0
    tokens_per_s: Annotated[
        float, about("Promised tokens per second, all workers together; 0: none.", min=0, commands=_BOTH)
    ] = 0.0
    workers: Annotated[
        int,
        about("Workers that keep the promise, with spares; 0: the most that were there.", min=0, commands=_ALONE),
    ] = 0


class DegradationSettings(Settings, frozen=True):
    """How long what is seen must last before the level follows."""

    fall_s: Annotated[
        float,
        about("How long capacity must be clearly below a bound before the level follows.", "s", min=0, commands=_ALONE),
    ] = 2.0
    fall_near_s: Annotated[
        float,
        about("How long capacity must be just below a bound before the level follows.", "s", min=0, commands=_ALONE),
    ] = 30.0
    return_s: Annotated[
        float, about("How long it must be clearly above a bound before the level returns.", "s", min=0, commands=_ALONE)
    ] = 10.0
    return_near_s: Annotated[
        float,
        about("How long it must be at a bound or just above it before the level returns.", "s", min=0, commands=_ALONE),
    ] = 30.0
    band: Annotated[
        float, about("What is nearer to a bound may be noise, as a share of the promise.", min=0, max=0.12)
    ] = 0.05
    flap_s: Annotated[
        float,
        about("A fall so soon after a return doubles how long the next return takes.", "s", min=0, commands=_ALONE),
    ] = 300.0
    hold_s: Annotated[
        float,
        about(
            "How long without any worker until nothing new is taken; as frontends' --hold-s.",
            "s",
            min=0,
            commands=_ALONE,
        ),
    ] = 30.0
    start_up_s: Annotated[
        float,
        about(
            "How long after the first worker the others may come, without being missed.", "s", min=0, commands=_ALONE
        ),
    ] = 120.0


class SpareSettings(Settings, frozen=True):
    """How many sound workers are kept without traffic."""

    spares: Annotated[
        str,
        about(
            "Workers kept in reserve, of each model: a number, or a share (10%), rounded down.",
            like=_SPARES,
            commands=_BOTH,
        ),
    ] = "0"
    # Longer than a worker that came back needs to show whether it stays (its proving, and a canary's interval).
    settle_s: Annotated[
        float, about("How long all must be well before a worker goes back into reserve.", "s", min=0)
    ] = 60.0

    def of(self, workers: int) -> int:
        """How many, of so many workers: at least one always serves."""
        share, is_share = self.spares.removesuffix("%"), self.spares.endswith("%")
        wanted = workers * int(share) // 100 if is_share else int(share)
        return max(0, min(wanted, workers - 1))


class LevelSettings(Settings, frozen=True):
    """What whoever decides on levels and spares is told."""

    slo: Annotated[SloSettings, about("What is promised.", prefix="slo-", **_PANEL)] = SloSettings()
    times: Annotated[DegradationSettings, about("When a level changes.", prefix="level-", **_PANEL)] = (
        DegradationSettings()
    )
    reserve: Annotated[SpareSettings, about("What is kept in reserve.", **_PANEL)] = SpareSettings()
