"""Makes the pods of a manifest: the plan that this machine's supervisor carries out. The plan has nothing specific to
this machine, so that an operator in a cluster could carry it out as well; there is none yet. No I/O.

Always true:
- The same manifest gives the same plan byte for byte.
- A set's name contains its hash, so that two sets of one service never share a name.
- Engines of a failover group differ only in their number and their port.
"""

from __future__ import annotations

import re

from holdfast.spec import canaries
from holdfast.spec.manifest.addresses import NO_DIGESTS, ComponentAddress, address_of, own_digests, variables
from holdfast.spec.manifest.parts import EnvVar, Probe
from holdfast.spec.manifest.pod import Claim, Container, Mount, Pod, Port, Question, Variable
from holdfast.spec.manifest.rules import PORT_VARIABLES, asked_of
from holdfast.spec.manifest.secrets import Digests
from holdfast.spec.manifest.types import FRONTEND, PLANNER, WORKER, Manifest, Service
from holdfast.spec.names import pod_name

HTTP_PORT = 8000
SYSTEM_PORT = 9090  # port of engine 0; the pod's other engines use the next ones
SHARED = "/shared"
SHARED_VOLUME = "failover-shared"
SHARED_GPUS = "shared-gpu"
LOCK = f"{SHARED}/failover.lock"
VAULT = "gms-weights"
PORT_OPTION = re.compile(r"--(?:http-)?port(?:=(\d+))?")

# Failures allowed for the startup probe: an engine may load for two hours; a frontend and a control start in seconds.
# Three failed liveness probes in a row end a container (docs/decisions.md, "Three failed liveness probes, not one").
STARTING = {FRONTEND: 60, PLANNER: 60, WORKER: 720}


def pods(manifest: Manifest, digests: Digests = NO_DIGESTS) -> list[Pod]:
    """Return the pod of every service, in the manifest's order. `digests`: hashes of this revision's secret values;
    without them, values are read when a replica starts."""
    return [_pod(manifest, name, service, digests) for name, service in manifest.spec.services.items()]


def _pod(manifest: Manifest, name: str, service: Service, digests: Digests) -> Pod:
    address = address_of(manifest, name, digests)
    failover = service.failover.enabled
    engines = range(service.failover.num_shadows + 1) if failover else range(1)
    return Pod(
        name=pod_name(manifest.name, name, address.hash8),
        service=name,
        component_type=service.component_type,
        namespace=address.namespace,
        component=address.component,
        replicas=service.replicas,
        init=(_vault(service),) if failover else (),
        containers=tuple(_container(manifest, name, address, engine_id, digests) for engine_id in engines),
        volumes=(SHARED_VOLUME,) if failover else (),
        claims=(Claim(SHARED_GPUS, service.gpus),) if failover else (),
        grace_s=service.extra_pod_spec.termination_grace_period_seconds,
    )


def _vault(service: Service) -> Container:
    """Return the vault of a failover group, which starts before its engines and outlives them."""
    devices = tuple(word for number in range(service.gpus) for word in ("--device", f"cuda-{number}"))
    # The sockets suffice: until the vault accepts, an engine's connection waits in the backlog.
    listening = f"test $(ls {SHARED}/gms_*.sock 2>/dev/null | wc -l) -ge {service.gpus}"
    return Container(
        name=VAULT,
        image=service.container.image,
        command=("holdfast", "memory", "serve"),
        args=("--socket-dir", SHARED, *devices),
        mounts=(Mount(SHARED_VOLUME, SHARED),),
        claims=(SHARED_GPUS,),
        startup=Question(command=("sh", "-c", listening), period_s=2, failures_max=150),
    )


def _container(manifest: Manifest, name: str, address: ComponentAddress, engine_id: int, digests: Digests) -> Container:
    service = manifest.spec.services[name]
    main, failover = service.container, service.failover.enabled
    written = variables(manifest, service)
    port = _port(service, written, engine_id)
    return Container(
        name=f"engine-{engine_id}" if failover else "main",
        image=main.image,
        command=main.command or ("holdfast", service.role),
        args=main.args,
        settings=tuple(service.given.items()),
        working_dir=main.working_dir,
        planned=_planned(manifest, name, address, port, engine_id),
        env=tuple(_variable(one) for one in written if not (failover and one.name == "DYN_SYSTEM_PORT")),
        env_from_secret=service.env_from_secret,
        digests=tuple(own_digests(manifest, service, digests).items()),
        ports=(port,),
        mounts=(Mount(SHARED_VOLUME, SHARED),) if failover else (),
        claims=(SHARED_GPUS,) if failover else (),
        gpus=0 if failover else service.gpus,
        startup=_question(main.startup_probe, port) or starting(service.component_type, port),
        liveness=_question(main.liveness_probe or service.liveness_probe, port) or living(port),
        readiness=_question(main.readiness_probe or service.readiness_probe, port)
        or Question(path="/health", port=port.name, timeout_s=4),
    )


def starting(component_type: str, port: Port) -> Question:
    """Return the default startup probe."""
    return Question(path="/live", port=port.name, timeout_s=5, failures_max=STARTING[component_type])


def living(port: Port) -> Question:
    """Return the default liveness probe."""
    return Question(path="/live", port=port.name, period_s=5, timeout_s=4)


def _port(service: Service, written: tuple[EnvVar, ...], engine_id: int) -> Port:
    """Return the port for probes; every engine of a pod has its own."""
    said = {one.name: int(one.value) for one in written if one.name in PORT_VARIABLES and one.value}
    if service.component_type == FRONTEND:
        option = service.given.get("--port") or _port_option((*service.container.command, *service.container.args))
        return Port("http", option or said.get("DYN_HTTP_PORT", HTTP_PORT))
    name = f"system-{engine_id}" if service.failover.enabled else "system"
    return Port(name, said.get("DYN_SYSTEM_PORT", SYSTEM_PORT) + engine_id)


def _port_option(words: tuple[str, ...]) -> int:
    """Return the port in a frontend's arguments; 0 if there is none."""
    for word, following in zip(words, (*words[1:], ""), strict=False):
        match = PORT_OPTION.fullmatch(word)
        number = match and (match[1] or following)
        if number and number.isdigit():
            return int(number)
    return 0


def _planned(
    manifest: Manifest, name: str, address: ComponentAddress, port: Port, engine_id: int
) -> tuple[Variable, ...]:
    service = manifest.spec.services[name]
    said = {"DYN_NAMESPACE": manifest.name}
    if service.component_type == FRONTEND:
        said |= {"DYN_HTTP_HOST": "0.0.0.0", "DYN_HTTP_PORT": str(port.number)}
        said |= {"HOLDFAST_SHARES": ",".join(manifest.spec.shares)} if manifest.spec.shares else {}
    else:
        said |= {"DYN_SYSTEM_ENABLED": "true", "DYN_SYSTEM_HOST": "0.0.0.0", "DYN_SYSTEM_PORT": str(port.number)}
    if service.component_type == WORKER:
        said |= {"DYN_NAMESPACE_WORKER_SUFFIX": address.hash8, "DYN_COMPONENT": address.component}
        said |= {"DYN_SYSTEM_STARTING_HEALTH_STATUS": "notready"}
        said |= {"DYN_SERVED_MODEL_NAME": service.model_name} if service.model_name else {}
        said |= {"HOLDFAST_CANARY_PROMPTS": canaries.written(asked_of(service))} if service.canary_prompts else {}
    if service.failover.enabled:
        said |= {"ENGINE_ID": str(engine_id), "GMS_SOCKET_DIR": SHARED}
        said |= {"FAILOVER_LOCK_PATH": service.failover.lock or LOCK}
    return tuple(Variable(*pair) for pair in said.items())


def _variable(written: EnvVar) -> Variable:
    if written.value_from is None:
        return Variable(written.name, written.value)
    secret, field = written.value_from.secret_key_ref, written.value_from.field_ref
    if secret is not None:
        return Variable(written.name, secret=secret.name, key=secret.key, optional=secret.optional)
    return Variable(written.name, field=field.field_path if field is not None else "")


def _question(probe: Probe | None, port: Port) -> Question | None:
    """Return a probe of the manifest; a named port is the container's own."""
    if probe is None:
        return None
    asked = probe.http_get
    return Question(
        path=asked.path if asked is not None else "",
        port=(asked.port if asked.port.isdigit() else port.name) if asked is not None else "",
        command=probe.exec.command if probe.exec is not None else (),
        delay_s=probe.initial_delay_seconds,
        period_s=probe.period_seconds,
        timeout_s=probe.timeout_seconds,
        failures_max=probe.failure_threshold,
    )
