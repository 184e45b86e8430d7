"""What went wrong, so that it can be told later: every unasked end of a supervised process, and every verdict that took
a worker's traffic away; why, and what it cost.

The supervisor writes them down (`supervise.incident_recorder`); `holdfast status` and `holdfast get incidents` read
them. Four know of them: the supervisor why a process ended, control what a worker did wrong, the engines' journals
which engine led when, the frontends what their streams saw.

Where several supervisors share a directory (a Ray node's actors) each has a file of its own, until it is gone and its
incidents are put with the others (`fold`).

Always true: of one file there is one writer; the last `INCIDENTS_MAX` are kept, across restarts of everything; nothing
is guessed: what no witness has said is None or empty; one cause is one incident: a verdict on a worker whose process
then ends, or on weights that two engines share, is told once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.failover.journal import SILENT_S, Term
from holdfast.supervise.engine_groups import with_new_standby
from holdfast.supervise.records import write_whole
from holdfast.supervise.status import Status

INCIDENTS_MAX = 100
APART = "incidents"  # the folder of those who share a directory
# From a process's end to when a supervisor that looks hears of it: milliseconds, on a starved machine a few seconds.
SEEN_LATE_NS = 5_000_000_000
# Two who saw the same end; an epoch, which may stand for it, is a whole millisecond.
SAME_ZERO_MS = 5.0
SUCCESSION_S = 120.0  # a group without a leader for longer has been started again, not taken over


class Incident(msgspec.Struct, frozen=True):
    """One process that ended unasked, or one worker that lost its traffic."""

    unix_s: float
    name: str
    role: str
    pid: int
    why: str
    part: str = ""  # "active" or "standby" of a group; empty: it has none, or was not ready yet
    group: str = ""
    instance: str = ""
    epoch: int = 0  # under which it led
    times: int = 1  # ends in a row before it was ready again
    back_after_s: float | None = None  # until a process of its name was ready again
    successor: str = ""  # who led next
    streams: int | None = None  # that went on elsewhere
    lost: int | None = None  # that did not
    gap_ms: float | None = None  # the worst of them saw, from its last token before to its first after
    failover: dict[str, Any] | None = None  # the successor's timeline
    verdict: str = ""  # the cause for which control took its traffic (`standing.Cause`); empty: its process ended
    fall: int = 0  # the number of that verdict's fall
    detected_unix_s: float | None = None  # when somebody knew
    isolated_unix_s: float | None = None  # when that was written down for all frontends: it gets no work from then on
    replayed: int | None = None  # tokens that its streams had shown, and that were sent again
    recomputed: int | None = None  # tokens of its streams' texts whose KV was not found where they went on
    to: dict[str, int] = {}  # streams that went on, by the worker that made their next token
    also: tuple[str, ...] = ()  # engines that share its weights, and its verdict
    ended_unix_s: float | None = None  # when its process ended, if a verdict was before

    @property
    def process_ended_s(self) -> float:
        """What a successor's times are counted from."""
        return self.unix_s if self.ended_unix_s is None else self.ended_unix_s


def read_incidents(state_dir: Path) -> list[Incident]:
    """Everybody's, oldest first."""
    apart = sorted((state_dir / APART).glob("*.json"))
    found = {(one.unix_s, one.name): one for path in (_path(state_dir), *apart) for one in _read(path)}
    return [found[key] for key in sorted(found)][-INCIDENTS_MAX:]


def read_own(state_dir: Path, apart: str = "") -> list[Incident]:
    """Those of one supervisor."""
    return _read(_path(state_dir, apart))


def _read(path: Path) -> list[Incident]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Incident])
    except (OSError, msgspec.DecodeError):
        return []


def write_incidents(state_dir: Path, incidents: Sequence[Incident], apart: str = "") -> None:
    """All there are of one supervisor; OSError if they cannot be written."""
    write_whole(_path(state_dir, apart), msgspec.json.encode(incidents))


def kept_apart(state_dir: Path) -> set[str]:
    """Who has a file of its own there."""
    return {path.stem for path in (state_dir / APART).glob("*.json")}


def fold(state_dir: Path, apart: str, more: Sequence[Incident] = ()) -> None:
    """One that kept its incidents apart is gone: put them, and `more` of it, with the others. OSError leaves all as it
    was."""
    found = {(one.unix_s, one.name): one for one in (*read_own(state_dir), *read_own(state_dir, apart), *more)}
    if found:
        write_incidents(state_dir, [found[key] for key in sorted(found)][-INCIDENTS_MAX:])
    _path(state_dir, apart).unlink(missing_ok=True)


def _path(state_dir: Path, apart: str = "") -> Path:
    return state_dir / APART / f"{apart}.json" if apart else state_dir / "incidents.json"


def led(terms: Sequence[Term], pid: int, looked_ns: int) -> int:
    """The epoch under which this process led until its end; 0: it did not. It was alive when the supervisor had last
    looked, so its successor may have begun a little before that, or at any time since."""
    own = [term for term in terms if term.pid == pid]
    if not own:
        return 0
    later = [term for term in terms if term.epoch > own[-1].epoch]
    return own[-1].epoch if not later or looked_ns - later[0].began_ns < SEEN_LATE_NS else 0


def ended_unix_s(terms: Sequence[Term], epoch: int, seen_unix_s: float) -> float:
    """When one that led under `epoch` ended, as far as is known: no later than its successor began."""
    later = [term.epoch / 1000 for term in terms if term.epoch > epoch > 0]  # an epoch is a time
    return min([seen_unix_s, *later])


def complete(incident: Incident, statuses: Sequence[Status], terms: Sequence[Term]) -> Incident:
    """With what frontends and engines can say of it by now; `terms` are its group's."""
    if incident.epoch:
        # An epoch is a time, too: whoever leads after the next start of everything took nothing over.
        until = (incident.process_ended_s + SUCCESSION_S) * 1000
        after = [term.engine for term in terms if incident.epoch < term.epoch < until]
        incident = replace(incident, successor=after[0] if after else "")
        told = [s.failover for s in statuses if s.failover and s.failover.get("from_pid") == incident.pid]
        if told:
            members = [status for status in statuses if status.group == incident.group]
            timed = with_new_standby(from_its_end(told[0], incident, terms), members)
            # The standby that was new then may have been replaced since.
            before = (incident.failover or {}).get("new_standby_ms")
            incident = replace(incident, failover=timed if before is None else timed | {"new_standby_ms": before})
    return _with_streams(incident, statuses)


def from_its_end(failover: dict[str, Any], incident: Incident, terms: Sequence[Term]) -> dict[str, Any]:
    """A successor's timeline, counted from the end of the one before. A successor that did not stand by (both had died)
    cannot know of it; nobody ended later than a supervisor saw it, so an earlier zero of the supervisor's is right."""
    if not all(isinstance(failover.get(key), int | float) for key in ("unix_s", "lock_ms", "zero_monotonic_s")):
        return failover
    late_ms = (failover["unix_s"] - incident.process_ended_s) * 1000 - failover["lock_ms"]
    if late_ms < SAME_ZERO_MS:
        return failover
    zero = "its end, as seen by the supervisor"
    ended_s = failover["zero_monotonic_s"] - late_ms / 1000
    heard_s = max((term.last_sent_ns / 1e9 for term in terms if term.epoch == incident.epoch), default=0.0)
    if 0.0 <= ended_s - heard_s < SILENT_S:
        late_ms, zero = late_ms + (ended_s - heard_s) * 1000, "the last leader's last token"
    later = {key: round(value + late_ms, 2) for key, value in failover.items() if key.endswith("_ms")}
    moved = {"zero": zero, "died_ms": 0.0, "zero_monotonic_s": failover["zero_monotonic_s"] - late_ms / 1000}
    return failover | later | moved


def _with_streams(incident: Incident, statuses: Sequence[Status]) -> Incident:
    heard = [status.seams for status in statuses if status.seams is not None]
    if not heard or not incident.instance:
        return incident
    seams = [seam for told in heard for seam in told if _is_of(seam, incident)]
    counts = ("streams", "lost", "replayed", "recomputed")
    streams, lost, replayed, recomputed = (sum(int(seam.get(name, 0)) for seam in seams) for name in counts)
    gap_ms = max((float(seam.get("worst_gap_ms", 0)) for seam in seams if seam.get("streams")), default=0.0) or None
    # A frontend that has died since takes what it knew with it; what was heard once stands.
    if incident.streams is not None and streams + lost < incident.streams + (incident.lost or 0):
        return incident
    found = {"streams": streams, "lost": lost, "gap_ms": gap_ms, "replayed": replayed, "recomputed": recomputed}
    return replace(incident, **found, to=_targets(seams))


def _targets(seams: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return how many streams went on at each worker, as far as pages of all versions say it."""
    told: Counter[str] = Counter()
    for seam in seams:
        to = seam.get("to")
        if isinstance(to, dict):
            told.update({str(name): streams for name, streams in to.items() if isinstance(streams, int)})
    return dict(told)


def _is_of(seam: dict[str, Any], incident: Incident) -> bool:
    """Whether these streams failed by it. What a worker survived before is no part of its end; frontends may have moved
    its streams before control's verdict reached them."""
    if seam.get("instance") != incident.instance:
        return False
    survived = bool(seam.get("survived"))
    if incident.verdict:
        fall = seam.get("fall", 0)
        before = not survived or incident.verdict == "breaker-open"  # those that failed one by one opened it
        return bool(fall == incident.fall or (fall == incident.fall - 1 and before))
    return seam.get("epoch") == incident.epoch and not survived
