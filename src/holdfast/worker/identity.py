"""Who this worker's process is, for observers on the same machine."""

from __future__ import annotations

import os

from holdfast.core.procfs import boot_id, pid_namespace, read_process
from holdfast.wire.messages import ProcessIdentity


def own_identity(beat_thread: int) -> ProcessIdentity:
    """Where an observer on this machine can look at this process. `beat_thread` is a native thread id."""
    stat = read_process(os.getpid())
    assert stat is not None, "/proc is not mounted, or does not show this process"
    return ProcessIdentity(
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=os.getpid(),
        start_ticks=stat.start_ticks,
        beat_thread=beat_thread,
    )
