"""What is wanted next of each replica, on the way to one revision. Pure.

Theory. Given what is there (`stock.py`), this is how it moves. Of a set on trial one replica is started, and nobody
leaves for it where there is room. Leaving is draining: streams are handed over, and what is left at the bound, when the
replica is stopped, its frontends resume.

Where there is no room for one more, a new engine stands by beside an old one on its device, if that has the memory.
When it is ready it takes over, the old one drains meanwhile, and is kept until the new one counts: nobody waits, for
both have what they need. Else one old one at a time gives up its place first, and requests that find nobody are held.

Always true: nobody is told to leave who may not; there are never more than replicas and surge, each in its own place;
who is wanted by the revision and drains is called back before another is started; a whole service that is wanted no
more leaves last; and to move twice, as things are, is to move once.
"""

from __future__ import annotations

from msgspec import structs

from holdfast.rollout.replica import DESIRED_RUNNING, DesiredState, ReplicaStage, ReplicaState
from holdfast.rollout.stock import WorkloadReplicas


def move_replicas(workload: WorkloadReplicas) -> None:
    """Change what is wanted, as far as it may be now."""
    _reconsider_unsent_drains(workload)
    _hand_over(workload)
    for service in workload.target.parts:
        _resume_draining(workload, service)
    for service in _unpaused(workload):
        _start(workload, service)
    _retire_all(workload)
    _stop_drained(workload)


def _unpaused(workload: WorkloadReplicas) -> list[str]:
    return [service for service in workload.target.parts if service not in workload.paused]


def _reconsider_unsent_drains(workload: WorkloadReplicas) -> None:
    """Who was to drain, serves and was not told (whoever decided it died) is thought of anew, as things are now."""
    for name, one in list(workload.replicas.items()):
        untold = (
            one.desired is DesiredState.DRAIN
            and one.sent_at_s is None
            and workload.seen(name).stage is ReplicaStage.SERVING
        )
        if untold and not workload.replacements(name):
            workload.set_desired(name, DesiredState.SERVE)


def _hand_over(workload: WorkloadReplicas) -> None:
    """Who stands by takes over when it is ready: from then on the one that it stands beside drains."""
    for name, one in list(workload.replicas.items()):
        if one.desired is not DesiredState.STAND_BY or workload.is_old(name):
            continue
        host = workload.replicas.get(one.beside)
        if host is None or host.desired is not DesiredState.SERVE:
            workload.set_desired(name, DesiredState.SERVE)
        elif (
            workload.seen(name).stage is ReplicaStage.STANDBY
            and one.service not in workload.paused
            and workload.is_enough(one.beside)
        ):
            workload.set_desired(name, DesiredState.SERVE)
            _leave(workload, one.beside)


def _resume_draining(workload: WorkloadReplicas, service: str) -> None:
    """Who drains and is wanted after all; also where it is paused, for it is no step forward."""
    for name in workload.select(service, old=False, desired=(DesiredState.DRAIN,))[: max(0, workload.missing(service))]:
        workload.set_desired(name, DesiredState.SERVE)


def _start(workload: WorkloadReplicas, service: str) -> None:
    few = min(workload.missing(service), workload.free_places(service))
    if workload.is_on_trial(service):
        few = min(few, 1 - len(workload.select(service, old=False, desired=(DesiredState.SERVE,))))
    for _ in range(few):
        workload.add(service)
    if workload.lacks_room(service) and (host := workload.share_candidate(service)):
        workload.add(service, beside=host)


def _retire_all(workload: WorkloadReplicas) -> None:
    """First those that are too many, what serves least and then the newest first; then other sets; last whole services
    wanted no more."""
    parts = workload.target.parts
    for service in _unpaused(workload):
        newest = list(reversed(workload.select(service, old=False)))
        newest.sort(key=workload.serving)
        _retire(workload, newest[: max(0, -workload.missing(service))])
        _retire(workload, sorted(workload.select(service, old=True), key=workload.serving))
    gone = [name for name, one in workload.replicas.items() if one.service not in parts]
    if all(map(workload.is_up, parts)):
        _retire(workload, gone)
    elif any(map(workload.lacks_room, parts)) and all(
        workload.replicas[name].desired in DESIRED_RUNNING for name in gone
    ):
        _retire(workload, gone[:1])


def _retire(workload: WorkloadReplicas, names: list[str]) -> None:
    staying: set[str] = set()  # of sets: where one that counts may not leave, no other may
    for name in names:
        one = workload.replicas[name]
        if (
            one.desired not in DESIRED_RUNNING
            or workload.replacements(name)
            or (one.set_id in staying and workload.counts(name))
        ):
            continue
        if workload.may_leave(name):
            _leave(workload, name)
        elif workload.counts(name):
            staying.add(one.set_id)


def _leave(workload: WorkloadReplicas, name: str) -> None:
    """By draining; who only stood by just ends, and the one it stood beside is called back."""
    one, part = workload.replicas[name], workload.part(workload.replicas[name].service)
    waited_for = one.service in workload.target.parts and workload.lacks_room(one.service)
    desired = DesiredState.STOP if one.desired is DesiredState.STAND_BY else DesiredState.DRAIN
    workload.set_desired(name, desired, part.swap_drain_s if waited_for else part.drain_s)
    if not waited_for and not workload.is_undo:
        _leave_as_last(workload, one)
    host = workload.replicas.get(one.beside)
    if host is not None and host.desired is DesiredState.DRAIN and not one.counted:
        workload.set_desired(one.beside, DesiredState.SERVE)


def _leave_as_last(workload: WorkloadReplicas, last: ReplicaState) -> None:
    """Of a set of which nobody stays, all that drain have the time that their streams take to end."""
    its = {n: one for n, one in workload.replicas.items() if (one.service, one.set_id) == (last.service, last.set_id)}
    until_s = workload.now_s + workload.part(last.service).last_drain_s
    if all(one.desired not in DESIRED_RUNNING for one in its.values()):
        workload.replicas |= {
            n: structs.replace(one, drain_until_s=until_s) for n, one in its.items() if one.drain_until_s
        }


def _stop_drained(workload: WorkloadReplicas) -> None:
    """Stop who has drained; but one with an heir only when that counts and was tried. Forget who is gone."""
    for name, one in list(workload.replicas.items()):
        if one.desired is DesiredState.DRAIN and workload.has_drained(name):
            workload.replicas[name] = structs.replace(one, drain_until_s=None)
            if all(map(workload.is_proven, workload.replacements(name))):
                workload.set_desired(name, DesiredState.STOP)
        if workload.replicas[name].desired is DesiredState.STOP and workload.seen(name).stage is ReplicaStage.ABSENT:
            del workload.replicas[name]
