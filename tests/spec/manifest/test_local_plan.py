"""A manifest on one machine: which processes it becomes, and that a container's words mean what they mean by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.arguments import with_values
from holdfast.cli.start import ControlCommand, FrontendCommand, WorkerCommand
from holdfast.core.errors import UserError
from holdfast.settings import read_environment
from holdfast.spec.arguments import options_of, parse
from holdfast.spec.commands import asked, control_by, frontend_by, worker_by
from holdfast.spec.deployment import device_slot
from holdfast.spec.jobs import Job
from holdfast.spec.launch import FrontendLaunch, Launch, Probes, StoredLaunch, StoreLaunch, VaultLaunch, WorkerLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine, replica_launches, slots_needed
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.whole import findings, full_gpus, whole, without_effect
from tests.rigs.manifests import RIGHT, accepted, worker

EXAMPLES = Path(__file__).parents[3] / "examples"
HOME = {"HOME": "/nowhere"}
MACHINE = Machine(Path("/tmp/hf"), HOME)
FRONTEND = "componentType: frontend\n"
GPUS = ("GPU-a", "GPU-b", "GPU-c")


def named(engine: str, source: str, name: str) -> tuple[str, str]:
    return source or "default", name or f"a {engine} model"


def launches(text: str, machine: Machine = MACHINE, gpus: tuple[str, ...] = ()) -> list[Launch]:
    return whole(accepted(text), machine, gpus, named)


def example(name: str, **where: Any) -> list[Launch]:
    return launches((EXAMPLES / f"{name}.yaml").read_text(), **where)


def workers(found: list[Launch]) -> list[WorkerLaunch]:
    return [launch for launch in found if isinstance(launch, WorkerLaunch)]


# -- words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("worker", ""),
        ("worker", "--engine sim --sim-ttft-ms 7 --sim-tpot-ms=3 --allow-chaos --served-name x --drain-s 1"),
        ("worker", "--engine torch --model tiny --exact --context 512 --kv-gib 1 --wake-s 3 --standby unmapped"),
        ("frontend", "--host 0.0.0.0 --port 9000 --api-key a --api-key b=premium --hold-s 3 --access-log"),
        ("control", "--canary-interval-s 5 --canary-share 0.5 --breaker-failures 2 --spares 1"),
    ],
)
def test_a_containers_words_mean_what_they_mean_by_hand(command: str, words: str) -> None:
    """For the same environment: what `holdfast COMMAND` would be started with."""
    env = read_environment({**HOME, "HOLDFAST_LOG": "debug", "DYN_SYSTEM_PORT": "9090", "DYN_HTTP_PORT": "9"})
    by_hand: Any = {"worker": WorkerCommand, "frontend": FrontendCommand, "control": ControlCommand}[command].of(env)
    options = options_of(by_hand, command)
    by_hand = with_values(by_hand, options, parse(words.split(), options, command))
    pattern: Any = {"worker": worker_by, "frontend": frontend_by, "control": control_by}[command](env)
    meant = asked(pattern, command, words.split())
    assert meant == (by_hand.spec if command == "frontend" else by_hand.launch)


@pytest.mark.parametrize(
    ("container", "said"),
    [
        (
            "{command: [python3, -m, dynamo.vllm]}",
            "`python3 -m dynamo.vllm` does not run on this machine; leave command out, or write [holdfast, worker]",
        ),
        (
            "{command: [holdfast, frontend]}",
            "`holdfast frontend` does not run on this machine; leave command out, or write [holdfast, worker]",
        ),
        ("{args: [--enigne, sim]}", "`holdfast worker` has no option --enigne; did you mean --engine?"),
        ("{args: [--sim-ttft-ms, soon]}", "--sim-ttft-ms must be a number, got 'soon'"),
        ("{args: [--engine, sim, --kv-gib, '1']}", "--kv-gib is for --engine torch or vllm and does nothing for sim"),
        ("{args: [--name, me]}", "--name is for the plan to say; leave it out"),
        ("{args: [--lock=/there]}", "--lock is for the plan to say; leave it out"),
        ("{args: [--help]}", "--help is for a person; leave it out"),
        ("{args: [--engine, torch]}", "the torch engine keeps its memory in a vault; enable failover"),
        ("{args: [--engine, vllm]}", "the vllm engine keeps its memory in a vault; enable failover"),
        ("{args: [--engine, sim, --, --seed, '1']}", "--vllm-option (also as words after --) is for --engine vllm and"),
        ("{env: [{name: HOLDFAST_LOG, value: loud}]}", "HOLDFAST_LOG must be debug, info, warning or error, "),
    ],
)
def test_what_does_not_run_here_is_told_with_its_place(container: str, said: str) -> None:
    """By service and line, as every other problem; a cluster may run it all the same."""
    text = worker(f"extraPodSpec: {{mainContainer: {container}}}")
    accepted(text)
    (problem,) = check(text.encode(), (partial(findings, machine=MACHINE),)).problems
    where = "line 12: spec.services.Worker.extraPodSpec.mainContainer: "
    assert str(problem).startswith(where + said)


def test_all_that_does_not_run_here_is_told_at_once() -> None:
    """One problem for each service."""
    text = worker("extraPodSpec: {mainContainer: {args: [--name, me]}}")
    text = text.replace(FRONTEND, FRONTEND + "      extraPodSpec: {mainContainer: {args: [x]}}\n")
    problems = check(text.encode(), (partial(findings, machine=MACHINE),)).problems
    assert [problem.path.split(".")[1:3] for problem in problems] == [
        ["services", "Frontend"],
        ["services", "Worker"],
    ]


def test_what_is_done_otherwise_here_is_warned_about() -> None:
    """Facts of a pod, which come from the starter's environment, probes that ask otherwise than the supervisor, and a
    GPU that nobody keeps for a worker without failover."""
    fact = "valueFrom: {fieldRef: {fieldPath: metadata.uid}}"
    text = worker(f"envs: [{{name: A, {fact}}}]\nlivenessProbe: {{exec: {{command: [a]}}}}")
    found = check(text.encode(), hints=(without_effect,)).warnings
    assert [problem.path.removeprefix("spec.services.Worker.") for problem in found] == [
        "resources.limits.gpu",
        "envs[0].valueFrom",
        "livenessProbe",
    ]
    (plain,) = workers(launches(text))
    assert plain.env == ()


@pytest.mark.parametrize(("args", "warned"), [("torch", True), ("torch, --kv-gib, '9'", False), ("sim", False)])
def test_a_pool_that_takes_all_that_is_left_is_warned_about(args: str, warned: bool) -> None:
    """Where there are GPUs: an update has no memory beside it. Whoever says --kv-gib leaves some."""
    text = worker(f"failover: {{enabled: true}}\nextraPodSpec: {{mainContainer: {{args: [--engine, {args}]}}}}")
    found = check(text.encode(), hints=(partial(full_gpus, machine=MACHINE),)).warnings
    assert ["leave some with --kv-gib" in str(problem) for problem in found] == [True] * warned


def test_what_follows_two_dashes_is_vllms() -> None:
    """Also a word that would be the plan's to say, were it ours."""
    words = "[--engine, vllm, --model, /m, --kv-gib, '2', --, --seed, '1', --name, x]"
    text = worker(f"failover: {{enabled: true}}\nextraPodSpec: {{mainContainer: {{args: {words}}}}}")
    for engine in workers(launches(text)):
        assert engine.vllm.options == ("--seed", "1", "--name", "x")
        assert (engine.engine, engine.source, engine.kv_gib) == ("vllm", "/m", 2.0)


def test_a_vllm_engine_has_a_gpu_for_each_rank() -> None:
    """Its ranks are vLLM's own word; a vault for each, and a manifest that asks for another number is told so."""
    words = "--engine, vllm, --model, /m, --kv-gib, '2'"
    text = worker(f"failover: {{enabled: true}}\nextraPodSpec: {{mainContainer: {{args: [{words}]}}}}")
    two = text.replace('gpu: "1"', 'gpu: "2"')
    with pytest.raises(UserError, match=r"--tensor-parallel-size 1 shares the model .* asks for 2; make both the same"):
        launches(two)
    for engine in workers(launches(two.replace("'2']", "'2', --, --tensor-parallel-size, '2']"))):
        assert engine.vllm.ranks == 1 + len(engine.failover.more_vaults) == 2
    with pytest.raises(UserError, match=r"--tensor-parallel-size 2 shares the model .* asks for 1"):
        launches(text.replace("'2']", "'2', --, -tp, '2']"))


def test_bounds_of_probes_and_stops_are_the_supervisors() -> None:
    """What a manifest says of them counts; what it leaves out is as `holdfast up` has it."""
    plain = Job.of(workers(launches(RIGHT))[0])
    assert plain.probes is not None
    assert (plain.probes.period_s, plain.probes.startup_s, plain.stop_bound_s) == (1.0, 7260.0, 3.0)
    probe = "{httpGet: {path: /live, port: system}, periodSeconds: 7, timeoutSeconds: 2, failureThreshold: 4}"
    said = f"livenessProbe: {probe}, startupProbe: {probe}"
    text = worker(f"extraPodSpec: {{terminationGracePeriodSeconds: 9, mainContainer: {{{said}}}}}")
    told = Job.of(workers(launches(text))[0])
    assert told.probes == Probes(period_s=7, failure_threshold=4, startup_s=28, timeout_s=2)
    assert told.stop_bound_s == 9
    warned = check(text.encode(), hints=(without_effect,)).warnings
    assert [one.path.rpartition(".")[2] for one in warned] == ["gpu", "timeoutSeconds"]  # of the startup probe


# -- processes


def test_a_failover_group_is_a_vault_and_its_engines() -> None:
    """As `holdfast up` has it: one vault, one lock, one group; engines by their number, each with its own sockets."""
    found = example("failover")
    (vault,) = (launch for launch in found if isinstance(launch, VaultLaunch))
    first, second = workers(found)
    assert (vault.device, vault.socket_path) == ("host-1", "/tmp/hf/gms/gms_host-1.sock")
    for number, engine in enumerate((first, second)):
        assert engine.name == f"{engine.group}-engine-{number}"
        assert (engine.failover.engine_id, engine.failover.vault_socket) == (number, vault.socket_path)
        assert (engine.lock, engine.standbys) == (f"flock:///tmp/hf/run/{engine.group}.lock", 1)
        assert engine.sim.vault_gib == 0.0625
    assert first.address != second.address


def test_every_address_is_one_process_alone() -> None:
    """Sockets, beats, locks and vaults of no two replicas are the same, in any example; frontends share their port."""
    for path in EXAMPLES.glob("*.yaml"):
        text = path.read_text().replace("replicas: 2", "replicas: 3")
        found = launches(text)
        names = [launch.name for launch in found]
        assert len(set(names)) == len(names)
        sockets = [one for launch in workers(found) for one in (launch.address, launch.beat_address)]
        assert len(set(sockets)) == len(sockets)
        vaults = [launch.socket_path for launch in found if isinstance(launch, VaultLaunch)]
        assert len(set(vaults)) == len(vaults)


def test_a_worker_stands_where_the_manifest_says() -> None:
    """Its namespace is the plan's address, and its name the manifest's."""
    manifest = accepted((EXAMPLES / "prefill-decode.yaml").read_text())
    wanted = {(pod.namespace, pod.component) for pod in pods(manifest) if pod.component_type == "worker"}
    found = workers(whole(manifest, MACHINE, (), named))
    assert {(launch.namespace(), launch.component) for launch in found} == wanted
    assert {launch.model for launch in found} == {"holdfast-sim"}


def test_an_upgrade_touches_what_changed_only() -> None:
    """Store, frontend and control of v2 are started with the very bytes of v1; no worker is."""
    before, after = ({one.name: msgspec.json.encode(one) for one in example(f"upgrade-v{v}")} for v in (1, 2))
    kept = before.items() & after.items()
    assert sorted(name.split("-")[1] if "-" in name else name for name, _ in kept) == ["control", "frontend", "store"]
    assert not any("worker" in name for name in before.keys() & after.keys())


def test_what_a_machine_has_stands_in_for_a_pods_own() -> None:
    """Its host, port, status host, store and vaults; but what the manifest says of its own container wins."""
    machine = Machine(
        Path("/tmp/hf"), HOME, store="etcd://e:1", vault_dir="/v", host="::1", port=81, status_host="0.0.0.0"
    )
    found = launches(worker("failover: {enabled: true}"), machine)
    assert not any(isinstance(launch, StoreLaunch) for launch in found)
    assert {launch.store for launch in found if isinstance(launch, StoredLaunch)} == {"etcd://e:1"}
    (frontend,) = (launch for launch in found if isinstance(launch, FrontendLaunch))
    assert frontend.address == "tcp://[::1]:81"
    first, _ = workers(found)
    assert (first.status_address, first.failover.vault_socket) == ("tcp://0.0.0.0:0", "/v/gms_host-1.sock")
    said = RIGHT.replace(FRONTEND, FRONTEND + "      extraPodSpec: {mainContainer: {args: [--port, '99']}}\n")
    (frontend,) = (launch for launch in launches(said, machine) if isinstance(launch, FrontendLaunch))
    assert frontend.address == "tcp://[::1]:99"


def test_variables_reach_the_process_and_its_settings() -> None:
    """The manifest's win over the starter's; the starter's own place in some other pod is nobody's."""
    machine = Machine(Path("/tmp/hf"), HOME | {"HOLDFAST_LOG": "error", "ENGINE_ID": "7", "FAILOVER_LOCK_PATH": "/l"})
    (plain,) = workers(launches(RIGHT, machine))
    assert (plain.log_level, plain.failover.engine_id, plain.lock, plain.env) == ("error", 0, "", ())
    text = worker("envs: [{name: HOLDFAST_LOG, value: debug}, {name: OMP_NUM_THREADS, value: '2'}]")
    (told,) = workers(launches(text, machine))
    assert told.log_level == "debug"
    assert dict(told.env) == {"HOLDFAST_LOG": "debug", "OMP_NUM_THREADS": "2"}


def test_devices_are_seats_of_their_replicas() -> None:
    """GPUs go round over all services; a real model's ranks are its GPUs, each with a vault of its own; a simulator is
    in host memory."""
    real = "failover: {enabled: true}\nextraPodSpec: {mainContainer: {args: [--engine, torch, --kv-gib, '1']}}"
    text = worker(real).replace('gpu: "1"', "gpu: 2")
    text += "    Sim: {componentType: worker, failover: {enabled: true}, resources: {limits: {gpu: 2}}}\n"
    text += "    More:\n" + worker(real).partition("    Worker:\n")[2]
    found = launches(text, gpus=GPUS)
    vaults = [launch.device for launch in found if isinstance(launch, VaultLaunch)]
    assert vaults == ["GPU-a", "GPU-b", "host-1", "GPU-c"]
    torch, _, sim, _, more, _ = workers(found)
    assert (torch.torch.ranks, torch.failover.device, torch.failover.more_vaults[0][1]) == (2, "GPU-a", "GPU-b")
    assert (sim.torch.ranks, sim.failover.device, sim.failover.more_vaults) == (1, "host-1", ())
    assert (more.failover.device, more.device_pairs) == ("GPU-c", 1)
    assert [launch.device_pairs for launch in workers(launches(text, gpus=GPUS[:2]))] == [2, 2, 1, 1, 2, 2]
    with pytest.raises(UserError, match="2 workers would share a GPU; say with --kv-gib"):
        launches(text.replace(", --kv-gib, '1'", ""), gpus=GPUS[:2])
    with pytest.raises(UserError, match="Worker: each replica needs 4 GPUs, and there are 3"):
        launches(text.replace("gpu: 2", "gpu: 4"), gpus=GPUS)


def test_a_replica_may_sit_anywhere() -> None:
    """One replica by itself, under a name and on seats that somebody chose."""
    pod = pods(accepted(worker("failover: {enabled: true}")))[1]
    assert slots_needed(pod, MACHINE) == (1, False)
    made = replica_launches(pod, "mine-7", [device_slot((), 41)], MACHINE)
    assert [launch.name for launch in made] == ["mine-7-vault", "mine-7-engine-0", "mine-7-engine-1"]
    assert isinstance(made[0], VaultLaunch)
    assert made[0].device == "host-42"


def test_a_path_too_long_for_sockets_is_refused() -> None:
    """Before anything is started, with the room there is."""
    with pytest.raises(UserError, match=r"is too long a name for sockets in .*at most \d+ bytes"):
        launches(RIGHT, Machine(Path("/" + "d" * 90), HOME))


def test_paths_are_relative_to_the_containers_directory() -> None:
    """Templates always; models where they are written as paths: `org/name` is a name."""
    arguments = "[--engine, torch, --model, ./m, --chat-template, t.jinja]"
    container = f"{{workingDir: /w, args: {arguments}}}"
    text = worker(f"failover: {{enabled: true}}\nextraPodSpec: {{mainContainer: {container}}}")
    first = workers(launches(text))[0]
    assert (first.source, first.chat_template) == ("/w/m", "/w/t.jinja")
    assert workers(launches(text.replace("./m", "org/name")))[0].source == "org/name"
