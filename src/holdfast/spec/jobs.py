"""Defines processes as a supervisor handles them: name, role, settings, probes, and the order of start and stop."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from holdfast.spec.launch import FrontendLaunch, Launch, Probes, StoredLaunch, VaultLaunch, WorkerLaunch, role_of

# Stages of the start: a worker needs its vault's memory, and all processes use the store.
START_ORDER = (("store", "vault"), ("worker", "frontend", "ray"))
# Started once the others serve; the start does not wait for them, because serving works without them.
AT_LEISURE = ("control",)
# Stages of the stop. Frontends stop first, so that no stream breaks when a worker stops. Control stops with them, so
# that it does not judge a stopping worker dead. Vaults stop after their engines, and the store last.
STOP_ORDER = (("frontend", "control"), ("worker", "ray"), ("vault", "server", "keeper"), ("store",))

# From SIGTERM to SIGKILL (s). A worker hands its streams back in milliseconds. With the frontends' drain and the limits
# of vaults and store, Ctrl-C takes ten seconds in total. A killed vault's memory is freed with its lifeline.
STOP_S = {"worker": 3.0, "store": 1.0, "vault": 1.0, "control": 1.0, "ray": 30.0}
FRONTEND_GRACE_S = 1.0  # added to the frontend's drain time
# Added to the time limit for loading, for imports, compilation and graph capture.
LOAD_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """A process that should run."""

    name: str
    role: str
    settings: bytes = b""  # its launch as JSON; jobs with equal settings are the same
    stop_bound_s: float = 5.0  # SIGTERM to SIGKILL
    probes: Probes | None = None  # None: it is not probed, and its start has no time limit
    beat_address: str = ""  # address of its heartbeat; empty: it has none
    group: str = ""  # failover group; empty: none
    deployment: str = ""  # empty: none, e.g. for a store

    @classmethod
    def of(cls, launch: Launch) -> Job:
        """Return the job for a launch."""
        assert launch.parent == 0, "who the parent is does not belong to the settings"
        role, settings, probes = role_of(launch), msgspec.json.encode(launch), launch.probes
        startup_s, stop_s, beats, group = Probes().startup_s, STOP_S.get(role, 0.0), "", ""
        if isinstance(launch, WorkerLaunch):
            startup_s, beats, group = launch.failover.load_s + LOAD_GRACE_S, launch.beat_address, launch.group
        if isinstance(launch, FrontendLaunch):
            stop_s = launch.drain_s + FRONTEND_GRACE_S
        probes = replace(probes, startup_s=probes.startup_s or startup_s)
        own = launch.deployment if isinstance(launch, StoredLaunch | VaultLaunch) else ""
        stop_s = launch.stop_s or stop_s
        return cls(launch.name, role, settings, stop_s, probes, beat_address=beats, group=group, deployment=own)
