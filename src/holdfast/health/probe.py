"""Looking at a worker's process from the same machine: what the kernel knows and no beat can tell (facts 31c).

Reads a few small files under /proc and the cgroup tree; never waits on the process, so it may be called from an
event loop. It reports; `liveness` judges.
"""

from __future__ import annotations

from functools import cache

from holdfast.core.procfs import boot_id, pid_namespace, read_process, read_text
from holdfast.health.verdicts import ProbeResult
from holdfast.wire.messages import ProcessIdentity


def is_local(identity: ProcessIdentity) -> bool:
    """Can this process be looked at from here? A pid says something only in its own boot and namespace."""
    if not identity.boot_id or not identity.pid_namespace:
        return False
    if (identity.boot_id, identity.pid_namespace) != (boot_id(), pid_namespace()):
        return False
    # Hidden by hidepid, or already dead and its pid someone else's: neither may be judged by what we see.
    stat = read_process(identity.pid)
    return stat is not None and stat.start_ticks == identity.start_ticks


def probe(identity: ProcessIdentity) -> ProbeResult:
    """One look. Only meaningful where `is_local`."""
    stat = read_process(identity.pid)
    if stat is None or stat.start_ticks != identity.start_ticks:
        return ProbeResult(gone=True)
    state, switches = _thread(identity.pid, identity.beat_thread)
    return ProbeResult(
        gone=False, state=stat.state, frozen=_is_frozen(identity.pid), thread_state=state, switches=switches
    )


def _thread(pid: int, thread: int) -> tuple[str, int]:
    """State letter and context switches of one thread; ("", 0) if it is gone."""
    text = read_text(f"/proc/{pid}/task/{thread}/status") or ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    switches = sum(int(fields.get(f"{kind}_ctxt_switches", "0")) for kind in ("voluntary", "nonvoluntary"))
    return fields.get("State", "").strip()[:1], switches


def _is_frozen(pid: int) -> bool:
    """Is its cgroup (v2), or one above it, frozen? The old freezer shows as a thread that makes no switches."""
    mount = _cgroup2_mount()
    lines = (read_text(f"/proc/{pid}/cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if mount is None or path is None:
        return False
    events = read_text(f"{mount}{path.rstrip('/')}/cgroup.events") or ""
    return "frozen 1" in events.splitlines()


@cache
def _cgroup2_mount() -> str | None:
    """Where the one cgroup v2 tree is mounted; it does not move while we run."""
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return place.split()[4]
    return None
