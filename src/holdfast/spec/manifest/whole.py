"""A whole manifest on one machine: every process that should run when nothing is being replaced. Pure.

Always true: what a process is told follows from its own service and this machine alone (but for GPUs that several
workers share), so that a change of one service touches no process of another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.core.errors import Refused
from holdfast.settings import read_environment
from holdfast.spec.commands import control_by
from holdfast.spec.deployment import Seat, pairs_on, seat_at
from holdfast.spec.launch import ControlLaunch, Launch, StoreLaunch, WorkerLaunch
from holdfast.spec.manifest.fleet import Fleet
from holdfast.spec.manifest.local import Machine, replica_launches, seats_of, worker_of
from holdfast.spec.manifest.parts import Probe
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.rules import Finding, Findings, Steps, probes_of, variables_in
from holdfast.spec.manifest.types import FRONTEND, PLANNER, PREFILL, WORKER, Manifest
from holdfast.spec.names import is_host

LEFT = (
    "on a GPU its KV pool takes all that is left, so that an update has no memory beside it and no worker serves while "
    "it is swapped in place; leave some with --kv-gib"
)
NONE = {
    FRONTEND: "with 0 replicas of it no request is answered",
    PLANNER: "with 0 replicas of it the supervisor's own control judges, with that one's settings",
    WORKER: "with 0 replicas of it no request for its model is answered",
}
PODS = "there are no pods here; what `holdfast` is started with is handed on"

# Of an engine, what was said after --model, and the name that clients ask for ("": none): what is loaded, and its name.
Named = Callable[[str, str, str], tuple[str, str]]


def whole(manifest: Manifest, machine: Machine, gpus: Sequence[str], named: Named) -> list[Launch]:
    """The store, if it is ours; every replica of every service; and a control, where the manifest has no planner."""
    launches: list[Launch] = []
    if not machine.store:
        launches.append(StoreLaunch(state_dir=str(machine.state_dir), name="store", address=machine.store_url))
    taken: dict[bool, list[list[Seat]]] = {True: [], False: []}  # on GPUs, and in host memory
    for pod in pods(manifest):
        ranks, on_gpus = seats_of(pod, machine)
        here = gpus if on_gpus else ()
        if here and ranks > len(here):
            raise Refused(f"{pod.service}: each replica needs {ranks} GPUs, and there are {len(here)}")
        for number in range(pod.replicas):
            first = sum(map(len, taken[bool(here)]))
            own = [seat_at(here, first + rank) for rank in range(ranks)]
            taken[bool(here)].append(own)
            launches += replica_launches(pod, pod.replica(number), own, machine)
    if not any(service.replicas for service in manifest.of_type(PLANNER).values()):
        launches.append(control_of(manifest.name, machine))
    return [settled_launch(launch, named, max(1, pairs_on(taken[True]))) for launch in launches]


def findings(manifest: Manifest, machine: Machine) -> Findings:
    """What of a manifest does not run on this machine, service by service: a rule beside the others."""
    for pod in pods(manifest):
        try:
            replica_launches(pod, pod.replica(0), [seat_at((), 0)] * seats_of(pod, machine)[0], machine)
        except Refused as error:
            yield Finding(("spec", "services", pod.service, "extraPodSpec", "mainContainer"), str(error))


def cramped(manifest: Manifest, machine: Machine) -> Findings:
    """What takes all that is left of a GPU, so that no update stands by beside it: a rule for warnings, where there are
    GPUs."""
    for pod in pods(manifest):
        with contextlib.suppress(Refused):  # that is told by itself
            if seats_of(pod, machine)[1] and not worker_of(pod, machine).kv_gib:
                yield Finding(("spec", "services", pod.service, "extraPodSpec", "mainContainer", "args"), LEFT)


def unheard(manifest: Manifest) -> Findings:
    """What a cluster carries out and this machine does in its own way, or not at all: a rule for warnings."""
    for name, service in manifest.spec.services.items():
        at: Steps = ("spec", "services", name)
        if not service.replicas:
            yield Finding((*at, "replicas"), NONE[service.component_type])
        if service.fleet != Fleet():
            yield Finding((*at, "fleet"), "only a fleet reads it: `holdfast up --backend local -f FILE`")
        if service.gpus and not service.failover.enabled:
            yield Finding((*at, "resources", "limits", "gpu"), "without failover no GPU is kept for it here")
        if service.component_type == WORKER and service.sub_component_type == PREFILL:
            what = "it serves whole requests, as decode workers do: no KV cache goes from one to the other"
            yield Finding((*at, "subComponentType"), what)
        for where, probe in probes_of(name, service):
            yield from _unheard_probe(where, probe)
    for where, variable in variables_in(manifest):
        if variable.value_from is not None and variable.value_from.field_ref is not None:
            yield Finding((*where, "valueFrom"), PODS)
    imaged = [name for name, service in manifest.spec.services.items() if service.container.image]
    if imaged:  # once: everybody's manifest has one in every service
        image = ("spec", "services", imaged[0], "extraPodSpec", "mainContainer", "image")
        yield Finding(image, "images are not run here: what is installed is, and another image only rolls it out again")


def _unheard_probe(at: Steps, probe: Probe) -> Findings:
    page = "/health" if at[-1] == "readinessProbe" else "/live"
    if at[-1] == "readinessProbe" or probe.http_get is None or probe.http_get.path != page:
        yield Finding(at, f"the supervisor here asks {page}, in its own way")
    elif at[-1] == "livenessProbe" and probe.initial_delay_seconds:
        yield Finding((*at, "initialDelaySeconds"), "the supervisor here asks as soon as it has started")
    elif at[-1] == "startupProbe" and probe.timeout_seconds != Probe().timeout_seconds:
        yield Finding((*at, "timeoutSeconds"), "the supervisor here keeps to the bound of all its questions together")


def control_of(deployment: str, machine: Machine) -> ControlLaunch:
    """Return the control that the supervisor runs where the manifest has no planner."""
    env = read_environment({**machine.environ, "HOLDFAST_STATE_DIR": str(machine.state_dir)})
    control = replace(control_by(env), deployment=deployment, store=machine.store_url)
    return replace(control, name=f"{deployment}-control", status_any=True)


def settled_launch(launch: Launch, named: Named, sharing: int) -> Launch:
    """With its model's name, and who shares its GPU; Refused where they would share what nobody divided."""
    if not isinstance(launch, WorkerLaunch):
        return launch
    source, model = named(launch.engine, launch.source, launch.model)
    pairs = 1 if is_host(launch.place.device) else sharing
    if pairs > 1 and not launch.kv_gib:
        raise Refused(f"{pairs} workers would share a GPU; say with --kv-gib how much each of their KV pools may have")
    return replace(launch, source=source, model=model, device_pairs=pairs)
