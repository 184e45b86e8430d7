"""Writes a model as a manifest, from the options of `holdfast deploy` or from a file, with all that is wrong with it.

There is one way from desired state to processes, `spec.manifest`: options are written as the manifest that says the
same, and mistakes in that are reported under the option that caused them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.deployments.files import Written, said_in, shaped
from holdfast.core.errors import Refused
from holdfast.roles.engines import memory_needed, weights_least
from holdfast.roles.model_names import named
from holdfast.spec.engines import GIB, REAL
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.manifest.addresses import address_of
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.fleet import Autoscale, Fleet
from holdfast.spec.manifest.from_options import manifest_text
from holdfast.spec.manifest.local import Machine, worker_of
from holdfast.spec.manifest.parts import Section
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.rules import Finding, Findings, Rules
from holdfast.spec.manifest.typed import WorkerBlock
from holdfast.spec.manifest.types import WORKER, Manifest, Service
from holdfast.spec.manifest.whole import findings
from holdfast.spec.manifest.yaml_text import Problem, in_yaml, plain
from holdfast.spec.names import check_process_name
from holdfast.spec.settings import Setting, fields_of

KEY = re.compile(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?")
KEY_WORDS = "1 to 30 of a-z, 0-9 and '-', with no '-' at either end"
SERIAL = 99_999  # a replica's, with more digits than one is likely to have
OWN = {
    "replicas": "--wanted",
    "modelName": "--served-name",
    "resources.limits.gpu": "--devices",
    "failover.numShadows": "--standbys",
}
NO_FRONTEND = ("spec.services", "spec.components")  # a fleet has frontends of its own
UNKNOWN = "how much memory it takes on each device is not known"
MEMORY_MENDS = {
    "torch": "say --kv-gib, if the model is on this machine, or --memory-gib",
    "vllm": "say --memory-gib, or name the model's directory",
}


@dataclass(frozen=True, slots=True)
class ModelText:
    """A valid manifest of one worker."""

    text: str
    manifest: Manifest
    launch: WorkerLaunch

    @property
    def key(self) -> str:
        return next(iter(self.manifest.spec.services))

    @property
    def service(self) -> Service:
        return self.manifest.spec.services[self.key]

    @property
    def version(self) -> str:
        return address_of(self.manifest, self.key).hash8

    @property
    def name(self) -> str:
        """Return the name that clients use."""
        return named(self.launch.engine, self.launch.source, self.launch.model)[1]

    @property
    def counts(self) -> bool:
        """Return True if it gives the number of replicas."""
        return "replicas" in plain(self.text)["spec"]["services"][self.key]

    @property
    def needed_bytes(self) -> int:
        """Return the bytes on each device, where the manifest does not say."""
        return 0 if self.service.fleet.memory_gib else memory_needed(self.launch)


# -- a file


def from_file(file: Path | None, machine: Machine) -> ModelText:
    """Read a model from a manifest; Refused, after all mistakes were printed by line."""
    written = shaped(said_in("deploy", file), rules(machine), hushed=NO_FRONTEND)
    return _made(written.text, written.manifest, machine)


def each_of(written: Written, machine: Machine) -> list[ModelText]:
    """Return the models of a valid manifest: one for each of its worker services."""
    whole = plain(written.text)
    services, found = whole["spec"]["services"], []
    for pod in pods(written.manifest):
        if pod.component_type == WORKER:
            own = {**whole, "spec": {**whole["spec"], "services": {pod.service: services[pod.service]}}}
            text = in_yaml(own)
            manifest = check(text.encode()).manifest
            assert manifest is not None, f"{pod.service} was fine beside others"
            found.append(_made(text, manifest, machine))
    return found


def rules_of_all(machine: Machine) -> Rules:
    """Return what is wrong with a whole manifest that is applied to a fleet."""
    apart = partial(told_apart, machine=machine)
    return (a_model, named_well, partial(findings, machine=machine), partial(known_memory, machine=machine), apart)


def a_model(manifest: Manifest) -> Findings:
    if not manifest.of_type(WORKER):
        yield Finding(("spec", "services"), "a fleet serves models, and no service here is a worker")


def told_apart(manifest: Manifest, machine: Machine) -> Findings:
    """Return an error for each name that two models have: clients ask by name."""
    known: dict[str, str] = {}
    for pod in (one for one in pods(manifest) if one.component_type == WORKER):
        try:
            launch = worker_of(pod, machine)
        except Refused:  # that is told by itself
            continue
        name = named(launch.engine, launch.source, launch.model)[1]
        if (other := known.setdefault(name, pod.service)) != pod.service:
            what = f"{other} and {pod.service} are both served as {name!r}, and clients could not tell them apart"
            yield Finding(("spec", "services", pod.service, "modelName"), what, mend="give each a name of its own")


def rules(machine: Machine) -> Rules:
    return (one_worker, named_well, partial(findings, machine=machine), partial(known_memory, machine=machine))


def one_worker(manifest: Manifest) -> Findings:
    services = manifest.spec.services
    if len(services) != 1 or not manifest.of_type(WORKER):
        mend = "a fleet has frontends and a control of its own; leave those out, and deploy models one by one"
        yield Finding(("spec", "services"), "a model is exactly one worker service", mend=mend)


def named_well(manifest: Manifest) -> Findings:
    for pod in (one for one in pods(manifest) if one.component_type == WORKER):
        at = ("spec", "services", pod.service)
        for node in manifest.spec.services[pod.service].fleet.nodes:
            try:
                check_process_name(node)
            except ValueError as error:
                yield Finding((*at, "fleet", "nodes"), f"no node is called {error}".replace(" must", ": it must"))
        if not KEY.fullmatch(pod.service):
            yield Finding(at, f"a model's key is {KEY_WORDS}, got {pod.service!r}")
            continue
        try:
            check_process_name(f"{pod.replica(SERIAL)}-engine-0")
        except ValueError:
            over = len(f"{pod.replica(SERIAL)}-engine-0") - 63
            what = f"its processes' names begin with {manifest.name}-{pod.service}, which is {over} too long"
            yield Finding(at, what, mend="give it a shorter one")


def known_memory(manifest: Manifest, machine: Machine) -> Findings:
    """Return an error if a model's device memory is not known, which its lease needs, or its device count is
    invalid."""
    for pod in (one for one in pods(manifest) if one.component_type == WORKER):
        service, at = manifest.spec.services[pod.service], ("spec", "services", pod.service)
        try:
            launch = worker_of(pod, machine)
        except Refused:  # that is told by itself
            continue
        if launch.engine not in REAL and service.gpus > 1:
            what = f"the simulator has one device, and not {service.gpus}"
            yield Finding((*at, "resources", "limits", "gpu"), what, mend="leave it out")
        if not service.fleet.memory_gib and not memory_needed(launch):
            mend = MEMORY_MENDS.get(launch.engine, "give it")
            yield Finding((*at, "fleet", "memoryGib"), UNKNOWN, mend=mend)
        weights = weights_least(launch) if service.fleet.host_gib else 0
        if weights > service.fleet.host_gib * GIB:
            what = f"its weights take {weights / GIB:.3g} GiB at least, and {service.fleet.host_gib:g} do not hold them"
            yield Finding((*at, "fleet", "hostGib"), what, mend="give more, or leave it out: then it is never WARM")


def _made(text: str, manifest: Manifest, machine: Machine) -> ModelText:
    (pod,) = pods(manifest)
    return ModelText(text, manifest, worker_of(pod, machine))


# -- options


def from_words(
    deployment: str, key: str, said: dict[str, Any], machine: Machine
) -> tuple[ModelText | None, list[str]]:
    """Return the model of a service's fields (`said`), or all mistakes, each under its option."""
    wrong = [] if KEY.fullmatch(key) else [f"KEY must be {KEY_WORDS}, got {key!r}"]
    service = key if not wrong else "model"
    text = manifest_text(deployment, {service: said})
    checked = check(text.encode(), rules(machine))
    wrong += [told(problem, service) for problem in checked.problems]
    if checked.manifest is None:  # what is wrong with its numbers hides what is wrong with where it runs
        size = {name: value for name, value in said.get("fleet", {}).items() if name == "memoryGib"}
        rest = manifest_text(deployment, {service: {**said, "replicas": 1, "fleet": size}})
        wrong += [told(problem, service) for problem in check(rest.encode(), rules(machine)).problems]
    if wrong or checked.manifest is None:
        return None, list(dict.fromkeys(wrong))
    return _made(text, checked.manifest, machine), []


def idle_words(fleet: Fleet) -> list[str]:
    """Return the autoscale options that were given without autoscaling."""
    scaling = fleet.autoscale
    if scaling.enabled:
        return []
    said = [one for one in fields_of(Autoscale, scaling) if one.default != getattr(Fleet().autoscale, one.name)]
    return [f"{one.flag} does nothing without --autoscale; leave it out, or say that, too" for one in said]


def told(problem: Problem, key: str) -> str:
    """Return a mistake under the option that caused it."""
    path = problem.path.removeprefix(f"spec.services.{key}").removeprefix(".")
    flag = flags().get(path, "")
    if problem.path == "metadata.name":
        flag = "--deployment"
    elif problem.path == f"spec.services.{key}":
        flag = "KEY"
    words = problem.what + (f"; {problem.mend}" if problem.mend else "")
    return f"{flag}: {words}" if flag else words


def flags() -> dict[str, str]:
    """Return the option of each field of a service, by path."""
    found = dict(OWN)
    for kind, path in ((Fleet, "fleet."), (Autoscale, "fleet.autoscale."), (WorkerBlock, "worker.")):
        for one in fields_of(kind):
            found[path + _written(kind, one)] = one.flag
    return found


def _written(kind: type[Section], setting: Setting) -> str:
    by_name = {one.name: one.encode_name for one in msgspec.structs.fields(kind)}
    return by_name[setting.name]
