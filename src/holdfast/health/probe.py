"""Looking at a worker's process from the same machine: what the kernel knows and no beat can tell (facts 31c).

Reads a few small files under /proc and the cgroup tree; never waits on the process, so it may be called from an
event loop. It reports; `liveness` judges.
"""

from __future__ import annotations

from holdfast.core.procfs import boot_id, is_frozen, pid_namespace, read_process, read_text
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
        gone=False, state=stat.state, frozen=is_frozen(identity.pid), thread_state=state, switches=switches
    )


def _thread(pid: int, thread: int) -> tuple[str, int]:
    """State letter and context switches of one thread; ("", 0) if it is gone."""
    text = read_text(f"/proc/{pid}/task/{thread}/status") or ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    switches = sum(int(fields.get(f"{kind}_ctxt_switches", "0")) for kind in ("voluntary", "nonvoluntary"))
    return fields.get("State", "").strip()[:1], switches
