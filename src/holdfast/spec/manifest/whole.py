"""Computes all processes of a manifest on one machine, outside a rollout. No I/O.

Always true: a process's settings depend only on its own service and this machine, so that a change of one service
affects no process of another. The exception is the number of workers that share a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.core.errors import Refused
from holdfast.settings import read_environment
from holdfast.spec.commands import control_by
from holdfast.spec.deployment import DeviceSlot, device_slot, pairs_on
from holdfast.spec.launch import ControlLaunch, Launch, StoreLaunch, WorkerLaunch
from holdfast.spec.manifest.fleet import Fleet
from holdfast.spec.manifest.local import Machine, replica_launches, slots_needed, worker_of
from holdfast.spec.manifest.parts import Probe
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.rules import Finding, Findings, Steps, probes_of, services_in, variables_in
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

# Function from engine, --model and served name ("": none) to the model's source and the name that clients use.
Named = Callable[[str, str, str], tuple[str, str]]


def whole(manifest: Manifest, machine: Machine, gpus: Sequence[str], named: Named) -> list[Launch]:
    """Return all processes: the embedded store, if it is used, the replicas of all services, and a control if there is
    no planner."""
    launches: list[Launch] = []
    if not machine.store:
        launches.append(StoreLaunch(state_dir=str(machine.state_dir), name="store", address=machine.store_url))
    taken: dict[bool, list[list[DeviceSlot]]] = {True: [], False: []}  # by whether they are on GPUs or in host memory
    for pod in pods(manifest):
        ranks, on_gpus = slots_needed(pod, machine)
        here = gpus if on_gpus else ()
        if here and ranks > len(here):
            raise Refused(f"{pod.service}: each replica needs {ranks} GPUs, and there are {len(here)}")
        for number in range(pod.replicas):
            first = sum(map(len, taken[bool(here)]))
            own = [device_slot(here, first + rank) for rank in range(ranks)]
            taken[bool(here)].append(own)
            launches += replica_launches(pod, pod.replica(number), own, machine)
    if not any(service.replicas for service in manifest.of_type(PLANNER).values()):
        launches.append(control_of(manifest.name, machine))
    return [with_model(launch, named, max(1, pairs_on(taken[True]))) for launch in launches]


def findings(manifest: Manifest, machine: Machine) -> Findings:
    """Yield the services that cannot run on this machine, with the reason (a rule for errors)."""
    for pod in pods(manifest):
        try:
            replica_launches(pod, pod.replica(0), [device_slot((), 0)] * slots_needed(pod, machine)[0], machine)
        except Refused as error:
            typed = manifest.spec.services[pod.service].typed is not None
            where = (pod.containers[0].command[1],) if typed else ("extraPodSpec", "mainContainer")
            yield Finding(("spec", "services", pod.service, *where), str(error))


def full_gpus(manifest: Manifest, machine: Machine) -> Findings:
    """Yield workers that take all free memory of a GPU, so that no update fits beside them (a rule for warnings, on
    machines with GPUs)."""
    for pod in pods(manifest):
        with contextlib.suppress(Refused):  # reported by `findings`
            if slots_needed(pod, machine)[1] and not worker_of(pod, machine).kv_gib:
                typed = manifest.spec.services[pod.service].typed is not None
                where = ("worker",) if typed else ("extraPodSpec", "mainContainer", "args")
                yield Finding(("spec", "services", pod.service, *where), LEFT)


def without_effect(manifest: Manifest) -> Findings:
    """Yield settings that have no effect here, or another one than in a cluster (a rule for warnings)."""
    for at, service in services_in(manifest):
        if not service.replicas:
            yield Finding((*at, "replicas"), NONE[service.component_type])
        if service.fleet != Fleet():
            yield Finding((*at, "fleet"), "only a fleet reads it: `holdfast up --backend local -f FILE`")
        if service.gpus and not service.failover.enabled:
            yield Finding((*at, "resources", "limits", "gpu"), "without failover no GPU is kept for it here")
        if service.component_type == WORKER and service.sub_component_type == PREFILL:
            what = "it serves whole requests, as decode workers do: no KV cache goes from one to the other"
            yield Finding((*at, "subComponentType"), what)
        for where, probe in probes_of(at, service):
            yield from _probe_without_effect(where, probe)
    for where, variable in variables_in(manifest):
        if variable.value_from is not None and variable.value_from.field_ref is not None:
            yield Finding((*where, "valueFrom"), PODS)
    imaged = [name for name, service in manifest.spec.services.items() if service.container.image]
    if imaged:  # only once: manifests have an image in every service
        image = ("spec", "services", imaged[0], "extraPodSpec", "mainContainer", "image")
        yield Finding(image, "images are not run here: what is installed is, and another image only rolls it out again")


def _probe_without_effect(at: Steps, probe: Probe) -> Findings:
    page = "/health" if at[-1] == "readinessProbe" else "/live"
    if at[-1] == "readinessProbe" or probe.http_get is None or probe.http_get.path != page:
        yield Finding(at, f"the supervisor here asks {page}, in its own way")
    elif at[-1] == "livenessProbe" and probe.initial_delay_seconds:
        yield Finding((*at, "initialDelaySeconds"), "the supervisor here asks as soon as it has started")
    elif at[-1] == "startupProbe" and probe.timeout_seconds != Probe().timeout_seconds:
        yield Finding((*at, "timeoutSeconds"), "the supervisor here keeps to the bound of all its questions together")


def control_of(deployment: str, machine: Machine) -> ControlLaunch:
    """Return the control that the supervisor runs if the manifest has no planner."""
    env = read_environment({**machine.environ, "HOLDFAST_STATE_DIR": str(machine.state_dir)})
    control = replace(control_by(env), deployment=deployment, store=machine.store_url)
    return replace(control, name=f"{deployment}-control", status_any=True)


def with_model(launch: Launch, named: Named, sharing: int) -> Launch:
    """Return the launch with its model's source and name, and the number of workers on its GPU. Raise Refused if
    several share a GPU without a KV pool size."""
    if not isinstance(launch, WorkerLaunch):
        return launch
    source, model = named(launch.engine, launch.source, launch.model)
    pairs = 1 if is_host(launch.failover.device) else sharing
    if pairs > 1 and not launch.kv_gib:
        raise Refused(f"{pairs} workers would share a GPU; say with --kv-gib how much each of their KV pools may have")
    return replace(launch, source=source, model=model, device_pairs=pairs)
