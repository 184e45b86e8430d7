"""What a deployment promises, how patient it is before it degrades, and what it keeps in reserve.

Always true: what is promised is a number above nothing or not promised; what must last longer near a bound does.
"""

from __future__ import annotations

import re
from typing import Annotated

from holdfast.spec.settings import Settings, about

_BOTH = ("up", "control")
_ALONE = ("control",)
_PANEL = {"panel": "Promises"}
_SPARES = re.compile(r"(\d{1,3})(%?)")
SPARE_PERCENT_MAX = 50  # more in reserve than at work is a typing mistake


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

    fall_s: Annotated[float, about("Below a bound by `band` or more.", "s", min=0, commands=_ALONE)] = 2.0
    fall_near_s: Annotated[float, about("Below a bound by less.", "s", min=0, commands=_ALONE)] = 30.0
    return_s: Annotated[float, about("Above a bound by `band` or more.", "s", min=0, commands=_ALONE)] = 10.0
    return_near_s: Annotated[float, about("At a bound, or above it by less.", "s", min=0, commands=_ALONE)] = 30.0
    band: Annotated[
        float, about("What is nearer to a bound may be noise, as a share of the promise.", min=0, max=0.12)
    ] = 0.05
    flap_s: Annotated[
        float, about("A fall so soon after a return doubles how long the next takes.", "s", min=0, commands=_ALONE)
    ] = 300.0
    hold_s: Annotated[
        float, about("Without any worker: as long as frontends hold streams.", "s", min=0, commands=_ALONE)
    ] = 30.0
    start_up_s: Annotated[
        float,
        about("From the first worker on: how long the others may take to come.", "s", min=0, commands=_ALONE),
    ] = 120.0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.fall_s <= self.fall_near_s:
            raise ValueError(f"fall_near_s must be {self.fall_s:g} or more, got {self.fall_near_s:g}")
        if not self.return_s <= self.return_near_s:
            raise ValueError(f"return_near_s must be {self.return_s:g} or more, got {self.return_near_s:g}")


class SpareSettings(Settings, frozen=True):
    """How many sound workers are kept without traffic."""

    spares: Annotated[
        str, about("Workers kept in reserve, of each model: a number, or a share (10%), rounded down.", commands=_BOTH)
    ] = "0"
    # Longer than a worker that came back needs to show whether it stays (its proving, and a canary's interval).
    settle_s: Annotated[
        float, about("How long all must be well before a worker goes back into reserve.", "s", min=0)
    ] = 60.0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        match = _SPARES.fullmatch(self.spares)
        if match is None or (match[2] and int(match[1]) > SPARE_PERCENT_MAX):
            raise ValueError(f"spares must be a number, or a share up to {SPARE_PERCENT_MAX}%, got {self.spares!r}")

    def of(self, workers: int) -> int:
        """How many, of so many workers: at least one always serves."""
        match = _SPARES.fullmatch(self.spares)
        assert match is not None, self
        wanted = workers * int(match[1]) // 100 if match[2] else int(match[1])
        return max(0, min(wanted, workers - 1))


class LevelSettings(Settings, frozen=True):
    """What whoever decides on levels and spares is told."""

    slo: Annotated[SloSettings, about("What is promised.", prefix="slo-", **_PANEL)] = SloSettings()
    times: Annotated[DegradationSettings, about("When a level changes.", prefix="level-", **_PANEL)] = (
        DegradationSettings()
    )
    reserve: Annotated[SpareSettings, about("What is kept in reserve.", **_PANEL)] = SpareSettings()
