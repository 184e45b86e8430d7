"""Who else is told what happens in a fleet."""

from __future__ import annotations

from typing import Annotated

from holdfast.spec.settings import Settings, about

_BOTH = {"commands": ("up", "control")}


class EventSettings(Settings, frozen=True):
    redis: Annotated[
        str,
        about(
            "Redis that receives fleet events in the stream dispatcher:events: redis://HOST:PORT/DB, rediss:// or"
            " unix://PATH.",
            **_BOTH,
        ),
    ] = ""
    redis_entries_max: Annotated[
        int, about("Approximate number of entries kept in the Redis stream.", min=1, **_BOTH)
    ] = 10_000
