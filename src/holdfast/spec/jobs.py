"""Processes that should run, as whoever keeps them running sees them: names, roles, settings, probes and order."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from holdfast.spec.launch import FrontendLaunch, Launch, StoredLaunch, VaultLaunch, WorkerLaunch
from holdfast.spec.probes import Probes
from holdfast.spec.roles import role_of

# Who is there before the others start: a worker needs its vault's memory, and everyone asks the store.
START_ORDER = (("store", "vault"), ("worker", "frontend", "ray"))
# Who comes when the others serve, and is waited for by nobody: serving goes on without.
AT_LEISURE = ("control",)
# Who leaves first has no peer left to break a stream of, and control takes no leaving worker for a dead one; memory
# outlives its engines, and the store goes last.
STOP_ORDER = (("frontend", "control"), ("worker", "ray"), ("vault", "server", "keeper"), ("store",))

# SIGTERM to SIGKILL. A worker hands its streams back in milliseconds; together with the frontends' drain, the vaults'
# and the store's bound this keeps a whole Ctrl-C at ten seconds. A killed vault's memory goes with its lifeline.
STOP_S = {"worker": 3.0, "store": 1.0, "vault": 1.0, "control": 1.0, "ray": 30.0}
FRONTEND_GRACE_S = 1.0  # on top of its own drain
# On top of loading, which gives up by itself: to import, compile and capture.
LOAD_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """One process that should run."""

    name: str
    role: str
    settings: bytes = b""  # what it is started with; two jobs with equal settings are the same
    stop_bound_s: float = 5.0  # SIGTERM to SIGKILL
    probes: Probes | None = None  # None: it is never asked, and may take as long as it likes to start
    beat_address: str = ""  # where its beats are heard; empty: it has none
    group: str = ""  # of engines that take over from each other; empty: it is in none
    deployment: str = ""  # whose it is; empty: nobody's, as a store

    @classmethod
    def of(cls, launch: Launch) -> Job:
        """The launch as its supervisor sees it."""
        assert launch.parent == 0, "who the parent is does not belong to the settings"
        role, settings, probes = role_of(launch), msgspec.json.encode(launch), launch.probes
        startup_s, stop_s, beats, group = Probes().startup_s, STOP_S.get(role, 0.0), "", ""
        if isinstance(launch, WorkerLaunch):
            startup_s, beats, group = launch.place.load_s + LOAD_GRACE_S, launch.beat_address, launch.group
        if isinstance(launch, FrontendLaunch):
            stop_s = launch.drain_s + FRONTEND_GRACE_S
        probes = replace(probes, startup_s=probes.startup_s or startup_s)
        own = launch.deployment if isinstance(launch, StoredLaunch | VaultLaunch) else ""
        stop_s = launch.stop_s or stop_s
        return cls(launch.name, role, settings, stop_s, probes, beat_address=beats, group=group, deployment=own)
