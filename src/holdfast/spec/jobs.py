"""Processes that should run, as whoever keeps them running sees them: names, roles, settings, probes and order."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.spec.launch import FrontendLaunch, Launch, WorkerLaunch, role_of

# Who is there before the others start: a worker needs its vault's memory, and everyone asks the store.
START_ORDER = (("store", "vault"), ("worker", "frontend"))
# Who comes when the others serve, and is waited for by nobody: serving goes on without.
AT_LEISURE = ("control",)
# Who leaves first has no peer left to break a stream of, and control takes no leaving worker for a dead one; memory
# outlives its engines, and the store goes last.
STOP_ORDER = (("frontend", "control"), ("worker",), ("vault", "server", "keeper"), ("store",))

# SIGTERM to SIGKILL. A worker hands its streams back in milliseconds; together with the frontends' drain, the vaults'
# and the store's bound this keeps a whole Ctrl-C at ten seconds. A killed vault's memory goes with its lifeline.
STOP_S = {"worker": 3.0, "store": 1.0, "vault": 1.0, "control": 1.0}
FRONTEND_GRACE_S = 1.0  # on top of its own drain
# On top of loading, which gives up by itself: to import, compile and capture.
LOAD_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Probes:
    """How a process is asked; the defaults are a kubelet's, but for a startup bound that a large model can keep."""

    period_s: float = 1.0  # between two questions; a second is what people notice
    failure_threshold: int = 3  # refusals in a row: one may be a moment between two states
    startup_s: float = 120.0  # from its start until it is ready: a cold 8B engine needs 32 s (facts 9)
    timeout_s: float = 1.0  # for an answer; past it the question counts as not asked


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

    @classmethod
    def of(cls, launch: Launch) -> Job:
        """The launch as its supervisor sees it."""
        assert launch.parent == 0, "who the parent is does not belong to the settings"
        role, settings, probes = role_of(launch), msgspec.json.encode(launch), Probes()
        if isinstance(launch, WorkerLaunch):
            probes = Probes(startup_s=launch.place.load_s + LOAD_GRACE_S)
            beats, group = launch.beat_address, launch.group
            return cls(launch.name, role, settings, STOP_S[role], probes, beat_address=beats, group=group)
        bound_s = launch.drain_s + FRONTEND_GRACE_S if isinstance(launch, FrontendLaunch) else STOP_S[role]
        return cls(launch.name, role, settings, bound_s, probes)
