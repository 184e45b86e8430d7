"""Engines: the contract of all of them, what lets one outlive its process, and those that come with Holdfast.

These names are the face of this room: an engine of your own needs no others (docs/engines-of-your-own.md). They are
looked up when asked for, so that importing the room loads none of what is behind them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.engines.contract import Capabilities, Engine, EngineEvents, Limits, Progress, ShadowEngine, Woken
    from holdfast.engines.paged.sequences import StepPlan
    from holdfast.engines.paged.settings import SchedulerSettings
    from holdfast.engines.shadow.engine import Tenant, VaultEngine
    from holdfast.engines.shadow.loading import BytesPlan, WeightsPlan
    from holdfast.engines.shadow.paged import PagedTenant
    from holdfast.engines.shadow.proving import Canary
    from holdfast.kv.geometry import Geometry
    from holdfast.spec.engines import Place

__all__ = [
    "BytesPlan",
    "Canary",
    "Capabilities",
    "Engine",
    "EngineEvents",
    "Geometry",
    "Limits",
    "PagedTenant",
    "Place",
    "Progress",
    "SchedulerSettings",
    "ShadowEngine",
    "StepPlan",
    "Tenant",
    "VaultEngine",
    "WeightsPlan",
    "Woken",
]

_PLACES = {
    "engines.contract": ("Capabilities", "Engine", "EngineEvents", "Limits", "Progress", "ShadowEngine", "Woken"),
    "engines.paged.sequences": ("StepPlan",),
    "engines.paged.settings": ("SchedulerSettings",),
    "engines.shadow.engine": ("Tenant", "VaultEngine"),
    "engines.shadow.loading": ("BytesPlan", "WeightsPlan"),
    "engines.shadow.paged": ("PagedTenant",),
    "spec.engines": ("Place",),
    "engines.shadow.proving": ("Canary",),
    "kv.geometry": ("Geometry",),
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"holdfast.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
