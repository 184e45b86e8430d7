"""Defines the rules between fields of a manifest that are each valid alone, and the settings that are refused by name.

A rule gets the whole manifest and yields findings: a path, as steps from the root, and what is wrong there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import structs

from holdfast.spec.arguments import nearest
from holdfast.spec.canaries import PROMPTS_MAX, CanaryPrompt
from holdfast.spec.manifest.fleet import Autoscale, Fleet
from holdfast.spec.manifest.parts import NAME, EnvVar, Probe
from holdfast.spec.manifest.types import (
    DECODE,
    FRONTEND,
    PREFILL,
    ROLES,
    SERVICES_MAX,
    WORKER,
    CanaryQuestion,
    Manifest,
    Service,
)

Steps = tuple[str | int, ...]

SERVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
NAME_CHARS_MAX = 63  # maximum length of a pod's name
SUFFIX_CHARS = len("-12345678-255")  # hash of a set, and number of a replica
SHARES_MAX = 16  # a frontend has three watches per shared deployment; a client of the store may have 64
PORT_MAX = 65525  # leaves ports above it for the other engines of a pod
PORT_VARIABLES = ("DYN_SYSTEM_PORT", "DYN_HTTP_PORT")
# Match options, also inside a shell command, and names in an argument that is JSON.
LORA_WORD = re.compile(r"(?<!\S)--(?:enable-lora|lora-|max-lora|lora\b)\S*")
DRAFT_WORD = re.compile(
    r"(?<!\S)--(?:speculative|draft-|spec-model|spec-dec|num-speculative)\S*|\"(?:speculative_|draft_model)\w*\""
)
# Variables that the plan sets, with the reason.
PLANNED = {
    "DYN_NAMESPACE": "it is metadata.name",
    "DYN_NAMESPACE_WORKER_SUFFIX": "it is the hash of what the worker is",
    "DYN_COMPONENT": "it is made of componentType and subComponentType",
    "DYN_SERVED_MODEL_NAME": "it is modelName",
    "HOLDFAST_CANARY_PROMPTS": "it is canaryPrompts",
    "ENGINE_ID": "every engine has its own",
    "GMS_SOCKET_DIR": "engines find their vault by it",
    "FAILOVER_LOCK_PATH": "it is failover.lock",
    "HOLDFAST_SHARES": "it is spec.shares",
}


@dataclass(frozen=True, slots=True)
class Finding:
    at: Steps
    what: str
    nearest: str = ""
    mend: str = ""


Findings = Iterator[Finding]


def _names(manifest: Manifest) -> Findings:
    services = manifest.spec.services
    if not services:
        yield Finding(("spec", "services"), "there is no service in it", mend="add a frontend and a worker")
    if len(services) > SERVICES_MAX:
        yield Finding(("spec", "services"), f"must be {SERVICES_MAX} or fewer, got {len(services)}")
    lower = Counter(name.lower() for name in services)
    room = NAME_CHARS_MAX - SUFFIX_CHARS - len(manifest.name) - 1
    for name in services:
        at = ("spec", "services", name)
        if not SERVICE_NAME.fullmatch(name):
            yield Finding(at, "a service's name is letters, digits and '-', with no '-' at either end")
        elif len(name) > room:
            mend = f"pods are named {manifest.name}-{name.lower()}-HASH-NUMBER, with {NAME_CHARS_MAX} at most"
            yield Finding(at, f"the name is {len(name) - room} characters too long", mend=mend)
        if lower[name.lower()] > 1:
            yield Finding(at, "another service has this name but for its capitals", mend="pods' names have none")


def _shares(manifest: Manifest) -> Findings:
    shares = manifest.spec.shares
    if shares and not manifest.of_type(FRONTEND):
        mend = "name this deployment in the shares of the one whose frontend serves it"
        yield Finding(("spec", "shares"), "there is no frontend here to share", mend=mend)
    if len(shares) > SHARES_MAX:
        yield Finding(("spec", "shares"), f"must be {SHARES_MAX} or fewer, got {len(shares)}")
    for index, other in enumerate(shares):
        at = ("spec", "shares", index)
        if not re.fullmatch(NAME[0], other):
            yield Finding(at, f"must be {NAME[1]}, got {other!r}")
        elif other == manifest.name:
            yield Finding(at, "a deployment's frontends serve its own workers anyway", mend="leave it out")
        elif other in shares[:index]:
            yield Finding(at, f"{other} is there twice", mend="leave one of them out")


def _failover(manifest: Manifest) -> Findings:
    for at, service in services_in(manifest):
        nodes = service.multinode.node_count if service.multinode is not None else 0
        if nodes and service.failover.enabled:
            what = "failover is not supported with multinode deployments"
            yield Finding((*at, "failover"), what, mend="leave one of them out")
        elif nodes:
            what = f"an engine runs on one machine, and not on {nodes}"
            yield Finding((*at, "multinode"), what, mend="leave it out; a machine's GPUs are resources.limits.gpu")
        if service.failover.enabled and service.component_type != WORKER:
            what = f"only workers have standbys, and this is a {service.component_type}"
            yield Finding((*at, "failover"), what, mend="leave it out")
        elif service.failover.enabled and service.gpus < 1:
            what, mend = "must be 1 or more with failover", 'write resources: {limits: {gpu: "1"}}'
            yield Finding((*at, "resources", "limits", "gpu"), what, mend=mend)
        if service.failover.lock and service.replicas > 1:
            what = f"one lock elects one engine, and there are {service.replicas} replicas"
            yield Finding((*at, "failover", "lock"), what, mend="leave it out; then every replica has its own")


def _models(manifest: Manifest) -> Findings:
    workers = manifest.of_type(WORKER).values()
    for at, service in services_in(manifest):
        if service.model_name and service.component_type != WORKER:
            what = f"a {service.component_type} serves no model of its own"
            yield Finding((*at, "modelName"), what, mend="leave it out")
        kinds = {one.sub_component_type for one in workers if one.model_name == service.model_name}
        if service.component_type == WORKER and service.sub_component_type == PREFILL and DECODE not in kinds:
            model = f" of {service.model_name}" if service.model_name else ""
            yield Finding((*at, "subComponentType"), f"there is no decode worker{model} that it could prefill for")
        if service.sub_component_type == "draft":
            mend = "leave it out; every model decodes by itself"
            yield Finding((*at, "subComponentType"), "draft models are not supported", mend=mend)


def asked_of(service: Service) -> tuple[CanaryPrompt, ...]:
    return tuple(CanaryPrompt(**structs.asdict(one)) for one in service.canary_prompts)


def _canaries(manifest: Manifest) -> Findings:
    written = {one.name: one.encode_name for one in structs.fields(CanaryQuestion)}  # field names as in manifests
    for at, service in services_in(manifest):
        at, asked = (*at, "canaryPrompts"), asked_of(service)
        if asked and service.component_type != WORKER:
            what = f"only workers are asked known questions, and this is a {service.component_type}; leave it out"
            yield Finding(at, what)
        if len(asked) > PROMPTS_MAX:
            yield Finding(at, f"must be {PROMPTS_MAX} or fewer, got {len(asked)}")
        for index, one in enumerate(asked):
            if (wrong := one.problem()) is not None:
                yield Finding((*at, index, written[wrong[0]]), wrong[1])


def _typed(manifest: Manifest) -> Findings:
    """Yield typed settings of another kind of service, and those beside a command or args, which would say it twice."""
    for at, service in services_in(manifest):
        for role in ROLES.values():
            if role != service.role and getattr(service, role) is not None:
                what = f"is not for a {service.component_type}, whose settings are called {service.role}"
                yield Finding((*at, role), what, mend="leave it out")
        twice = [name for name in ("args", "command") if getattr(service.container, name)]
        if service.typed is not None and twice:
            what = f"the settings are in {service.role}, and {twice[0]} would be a second place for them"
            where = (*at, "extraPodSpec", "mainContainer", twice[0])
            yield Finding(where, what, mend=f"leave {twice[0]} out, or {service.role}")


def _refused_words(manifest: Manifest) -> Findings:
    """Yield options and variables that other engines have for adapters and draft models."""
    for service_at, service in services_in(manifest):
        at = (*service_at, "extraPodSpec", "mainContainer")
        places = {
            (*at, "command"): service.container.command,
            (*at, "args"): service.container.args,
            (*service_at, "worker", "vllmOption"): service.given.get("--vllm-option", ()),
        }
        for where, index, word in ((where, *one) for where, words in places.items() for one in enumerate(words)):
            if found := LORA_WORD.search(word):
                mend = "serve the merged model under a name of its own"
                yield Finding((*where, index), f"LoRA adapters are not supported ({found[0]})", mend=mend)
            elif found := DRAFT_WORD.search(word):
                mend, said = "leave it out; every model decodes by itself", found[0].strip('"')
                yield Finding((*where, index), f"draft models are not supported ({said})", mend=mend)
    for at, variable in variables_in(manifest):
        if variable.name.startswith("DYN_LORA_"):
            yield Finding((*at, "name"), f"LoRA adapters are not supported ({variable.name})", mend="leave it out")


def _environment(manifest: Manifest) -> Findings:
    seen: set[tuple[Steps, str]] = set()
    for at, variable in variables_in(manifest):
        if (at[:-1], variable.name) in seen:
            yield Finding((*at, "name"), f"{variable.name} is there twice", mend="leave one of them out")
        seen.add((at[:-1], variable.name))
        if variable.value_from is not None and variable.value:
            yield Finding(at, f"{variable.name} has a value and a valueFrom", mend="leave one of them out")
        elif (source := variable.value_from) and (source.secret_key_ref is None) == (source.field_ref is None):
            what = "there are two sources of its value" if source.field_ref else "there is no source of its value"
            yield Finding((*at, "valueFrom"), what, mend="give secretKeyRef or fieldRef")
        elif variable.name in PORT_VARIABLES and (variable.value_from or not _is_port(variable.value)):
            what = f"{variable.name} must be a port that probes can ask, got {variable.value!r}"
            yield Finding((*at, "value"), what, mend=f"1 to {PORT_MAX}, or leave it out")
        elif variable.name == "DYN_SYSTEM_ENABLED" and variable.value.lower() in ("false", "0", "no", "off"):
            yield Finding((*at, "value"), "probes ask the status page", mend="leave DYN_SYSTEM_ENABLED out")


def _probes(manifest: Manifest) -> Findings:
    for service_at, service in services_in(manifest):
        for at, probe in probes_of(service_at, service):
            if (probe.http_get is None) == (probe.exec is None):
                what = "there are two ways to ask" if probe.exec is not None else "there is no way to ask"
                yield Finding(at, what, mend="give httpGet or exec")
            port = probe.http_get.port if probe.http_get is not None else ""
            known = "http" if service.component_type == FRONTEND else "system"
            if port and not port.isdigit() and port != known:
                what = f"there is no port {port!r} on a {service.component_type}"
                meant = nearest(port, [known])
                mend = "" if meant else f"it has the port {known}"
                yield Finding((*at, "httpGet", "port"), what, meant, mend)
            elif port.isdigit() and service.failover.enabled:
                mend = "write the port's name, system"
                yield Finding((*at, "httpGet", "port"), "every engine of a failover group has its own port", mend=mend)


def _rollouts(manifest: Manifest) -> Findings:
    for at, service in services_in(manifest):
        if {service.rollout.max_surge.strip("0%"), service.rollout.max_unavailable.strip("0%")} == {""}:
            what = "maxSurge and maxUnavailable are both 0, so that nothing could ever be replaced"
            yield Finding((*at, "rollout"), what, mend="give one of them 1")


def _fleets(manifest: Manifest) -> Findings:
    for at, service in services_in(manifest):
        fleet, wanted = service.fleet, service.replicas
        if service.component_type != WORKER and fleet != Fleet():
            what = f"a fleet keeps workers, and this is a {service.component_type}"
            yield Finding((*at, "fleet"), what, mend="leave it out")
        most = fleet.replicas_max or 0
        if fleet.replicas_max == 0 and fleet.autoscale.enabled:
            what = "must be 1 or more with autoscaling, got 0: no replica could ever be started"
            yield Finding((*at, "fleet", "replicasMax"), what, mend="give an upper bound, or disable autoscaling")
        if 0 < most < fleet.replicas_min:
            what = f"must be {fleet.replicas_min} or more, as many as at least, got {most}"
            yield Finding((*at, "fleet", "replicasMax"), what, mend="leave it out, or ask for fewer at least")
        if 0 < most < wanted:
            what = f"{wanted} replicas are desired, and at most {most} are allowed"
            yield Finding((*at, "replicas"), what, mend=f"ask for {most}, or allow {wanted}")
        if fleet.level == "warm" and not fleet.host_gib:
            what = "a floor of WARM needs host memory, and how much is not given"
            yield Finding((*at, "fleet", "hostGib"), what, mend="give what the weights take, e.g. 16")
        if fleet.replicas_min and fleet.level == "cold":
            what = "on disk there are no replicas, so that none are kept"
            yield Finding((*at, "fleet", "replicasMin"), what, mend="give a floor of hot or warm, or leave it out")
        if fleet.autoscale.kv_low >= fleet.autoscale.kv_high:
            what = f"must be under {fleet.autoscale.kv_high:g}, at which a replica is added"
            yield Finding((*at, "fleet", "autoscale", "kvLow"), what, mend="between the two nothing changes")


Rules = tuple[Callable[[Manifest], Findings], ...]
# Rules of a single service.
OF_EACH: Rules = (_typed, _failover, _canaries, _refused_words, _environment, _probes, _rollouts, _fleets)
OF_ALL: Rules = (_names, _shares, _models)


# -- warnings: accepted without effect, or with less than expected


def _idle_variables(manifest: Manifest) -> Findings:
    for at, variable in variables_in(manifest):
        if variable.name in PLANNED:
            yield Finding((*at, "name"), f"{variable.name} does nothing here: {PLANNED[variable.name]}")


def _not_enabled(manifest: Manifest) -> Findings:
    what = "does nothing while it is not enabled"
    for at, service in services_in(manifest):
        if not service.failover.enabled and (service.failover.num_shadows > 1 or service.failover.lock):
            yield Finding((*at, "failover"), what)
        if not service.fleet.autoscale.enabled and service.fleet.autoscale != Autoscale(enabled=False):
            yield Finding((*at, "fleet", "autoscale"), what)


def _never_asked(manifest: Manifest) -> Findings:
    if manifest.of_type(WORKER) and not manifest.of_type(FRONTEND):
        what = "there is no frontend: its workers serve only a deployment whose spec.shares names this one"
        yield Finding(("spec", "services"), what)


WARNINGS: Rules = (_idle_variables, _not_enabled, _never_asked)


# -- used by several rules


def services_in(manifest: Manifest) -> Iterator[tuple[Steps, Service]]:
    """Yield every service, with its path."""
    for name, service in manifest.spec.services.items():
        yield ("spec", "services", name), service


def variables_in(manifest: Manifest) -> Iterator[tuple[Steps, EnvVar]]:
    """Yield every variable of the manifest, with its path."""
    for index, variable in enumerate(manifest.spec.envs):
        yield ("spec", "envs", index), variable
    for at, service in services_in(manifest):
        for index, variable in enumerate(service.envs):
            yield (*at, "envs", index), variable
        for index, variable in enumerate(service.container.env):
            yield (*at, "extraPodSpec", "mainContainer", "env", index), variable


def probes_of(at: Steps, service: Service) -> Iterator[tuple[Steps, Probe]]:
    """Yield every probe of the service at this path, with its own path."""
    main: Steps = (*at, "extraPodSpec", "mainContainer")
    container = service.container
    for where, probe in (
        ((*at, "livenessProbe"), service.liveness_probe),
        ((*at, "readinessProbe"), service.readiness_probe),
        ((*main, "startupProbe"), container.startup_probe),
        ((*main, "livenessProbe"), container.liveness_probe),
        ((*main, "readinessProbe"), container.readiness_probe),
    ):
        if probe is not None:
            yield where, probe


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= PORT_MAX
