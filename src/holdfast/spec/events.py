"""Who else is told what happens in a fleet."""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about

_BOTH = {"commands": ("up", "control")}


class EventSettings(Settings, frozen=True):
    redis: Annotated[
        str,
        about(
            "A Redis whose stream dispatcher:events is told what happens in the fleet: redis://HOST:PORT/DB, rediss:// "
            "or unix://PATH.",
            **_BOTH,
        ),
    ] = ""
    redis_entries_max: Annotated[int, about("Entries that the stream keeps, about.", min=1, **_BOTH)] = 10_000
