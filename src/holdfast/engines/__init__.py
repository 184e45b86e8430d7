"""The engines that come with Holdfast, the contract of all engines, and what lets an engine's memory outlive its
process.

These names are the public API: your own engine needs no others (docs/engines-of-your-own.md). They are imported on
first use, so that importing this package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.engines.contract import Capabilities, Engine, EngineEvents, FailoverEngine, Limits, Progress, Woken
    from holdfast.engines.host.engine import HostedEngine, VaultEngine
    from holdfast.engines.host.loading import BytesPlan, WeightsPlan
    from holdfast.engines.host.paged import PagedEngine
    from holdfast.engines.host.proving import Canary
    from holdfast.engines.paged.scheduler import SchedulerSettings
    from holdfast.engines.paged.sequences import StepPlan
    from holdfast.kv.geometry import Geometry
    from holdfast.spec.engines import FailoverSettings

__all__ = [
    "BytesPlan",
    "Canary",
    "Capabilities",
    "Engine",
    "EngineEvents",
    "FailoverEngine",
    "FailoverSettings",
    "Geometry",
    "HostedEngine",
    "Limits",
    "PagedEngine",
    "Progress",
    "SchedulerSettings",
    "StepPlan",
    "VaultEngine",
    "WeightsPlan",
    "Woken",
]

_MODULES = {
    "engines.contract": ("Capabilities", "Engine", "EngineEvents", "Limits", "Progress", "FailoverEngine", "Woken"),
    "engines.paged.sequences": ("StepPlan",),
    "engines.paged.scheduler": ("SchedulerSettings",),
    "engines.host.engine": ("HostedEngine", "VaultEngine"),
    "engines.host.loading": ("BytesPlan", "WeightsPlan"),
    "engines.host.paged": ("PagedEngine",),
    "spec.engines": ("FailoverSettings",),
    "engines.host.proving": ("Canary",),
    "kv.geometry": ("Geometry",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"holdfast.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
