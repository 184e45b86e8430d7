"""What replicas that are gone have left on disk: their locks and journals go, and of their logs all but the last few.

A replica's name is used once, so nobody ever takes up what one has left. Its records and sockets go with its processes.

Always true: nothing of a replica that has a process here is touched, nor anything that is of no replica; what cannot be
removed is left for the next time.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from holdfast.supervise.records import journals_dir, run_dir
from holdfast.supervise.replicas import ReplicaId, replica_id_of

LOGS_KEPT = 2  # replicas of each model: the last that left, and the one before, to compare


def clear(state_dir: Path, deployment: str, processes: Iterable[str] = ()) -> None:
    """Remove all that a deleted deployment has left: what `sweep` removes, every log, and what its own control left."""
    sweep(state_dir, deployment, processes, logs_kept=0)
    with contextlib.suppress(OSError):
        for path in (state_dir / "logs").glob(f"{deployment}-control.log*"):
            path.unlink(missing_ok=True)
        (run_dir(state_dir) / f"control-{deployment}.lock").unlink(missing_ok=True)


def sweep(state_dir: Path, deployment: str, processes: Iterable[str], logs_kept: int = LOGS_KEPT) -> None:
    """`processes`: all that are here, by name; `logs_kept`: of so many replicas of each model the logs stay."""
    there = {replica_id_of(name, deployment, ()) for name in processes}

    def left(paths: Iterable[Path]) -> list[tuple[ReplicaId, Path]]:
        found = [(replica_id_of(path.name.partition(".")[0], deployment, ()), path) for path in paths]
        return [(whom, path) for whom, path in found if whom is not None and whom not in there]

    with contextlib.suppress(OSError):
        for _, path in left(run_dir(state_dir).glob("*.lock")):
            path.unlink(missing_ok=True)
        for _, path in left(journals_dir(state_dir, "").glob("*")):
            shutil.rmtree(path, ignore_errors=True)
        logs = left((state_dir / "logs").glob("*.log*"))
        kept = _last({whom for whom, _ in logs}, logs_kept)
        for _, path in (one for one in logs if one[0] not in kept):
            path.unlink(missing_ok=True)


def _last(gone: set[ReplicaId], count: int) -> set[ReplicaId]:
    """The last few of each model."""
    kept: dict[str, list[ReplicaId]] = {}
    for whom in sorted(gone, key=lambda one: int(one.name.rpartition("-")[2]), reverse=True):
        kept.setdefault(whom.service, []).append(whom)
    return {whom for own in kept.values() for whom in own[:count]}
