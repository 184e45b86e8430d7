"""The pod plan of every example as a text that review reads, and what must hold for every plan."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.spec.manifest.pod import Container, Pod, Question
from holdfast.spec.manifest.pods import pods
from tests.rigs.manifests import RIGHT, accepted, worker
from tests.rigs.transcripts import must_go_as_written, stories, transcripts

EXAMPLES = Path(__file__).parents[3] / "examples"


def shown(question: Question | None) -> str:
    if question is None:
        return "never"
    what = " ".join(question.command) or f"GET {question.path} at {question.port}"
    delay = f" after {question.delay_s} s" if question.delay_s else ""
    often = f"every {question.period_s} s, {question.timeout_s} s to answer, {question.failures_max} failures"
    return f"{what}{delay}, {often}"


def container_lines(kind: str, one: Container) -> list[str]:
    lines = [f"{kind} {one.name}: {' '.join(one.words)}", f"  image {one.image or '-'}, restart {one.restart}"]
    if one.working_dir:
        lines.append(f"  in {one.working_dir}")
    lines += [f"  plan sets {variable.name}={variable.value}" for variable in one.planned]
    lines += [f"  env {variable.name}={variable.value or f'{variable.secret}[{variable.key}]'}" for variable in one.env]
    lines += [f"  port {port.name} {port.number}" for port in one.ports]
    lines += [f"  volume {mount.volume} at {mount.path}" for mount in one.mounts]
    lines += [f"  claim {claim}" for claim in one.claims]
    for name, question in (("startup", one.startup), ("liveness", one.liveness), ("readiness", one.readiness)):
        lines.append(f"  {name}: {shown(question)}")
    return lines


def pod_lines(pod: Pod) -> list[str]:
    lines = [f"{pod.replicas} x {pod.name}, at {pod.namespace}/{pod.component}, {pod.grace_s} s to stop"]
    lines += [f"  claim {claim.name}: {claim.gpus} GPU" for claim in pod.claims]
    lines += [f"  volume {volume}" for volume in pod.volumes]
    for kind, containers in (("first", pod.init), ("then", pod.containers)):
        lines += [f"  {line}" for one in containers for line in container_lines(kind, one)]
    return lines


class Plans:
    def play(self, command: str) -> list[str]:
        manifest = accepted((EXAMPLES / command.removeprefix("plan ")).read_text())
        return [f"  {line}" for pod in pods(manifest) for line in pod_lines(pod)]


@stories("pods", least=1)
def test_the_plan_of_an_example_goes_as_written(path: Path) -> None:
    """Every container of every example, with all it is told and asked."""
    must_go_as_written(path, Plans)


def test_every_example_has_its_transcript() -> None:
    """None is forgotten."""
    written = "".join(path.read_text() for path in transcripts("pods"))
    assert all(f"> plan {path.name}\n" in written for path in EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("shadows", [0, 1, 2, 8])
def test_engines_of_a_group_differ_in_their_number_and_port_only(shadows: int) -> None:
    """All take turns with one lock beside one vault, which is there before them; ports are next to each other."""
    port = "envs: [{name: DYN_SYSTEM_PORT, value: '7000'}]"
    text = worker(f"failover: {{enabled: true, numShadows: {shadows}}}\n{port}")
    pod = pods(accepted(text))[1]
    assert [one.name for one in pod.init] == ["gms-weights"]
    assert [one.name for one in pod.containers] == [f"engine-{number}" for number in range(shadows + 1)]
    environments = [{variable.name: variable.value for variable in one.planned} for one in pod.containers]
    assert [one["ENGINE_ID"] for one in environments] == [str(number) for number in range(shadows + 1)]
    assert [one["DYN_SYSTEM_PORT"] for one in environments] == [str(7000 + number) for number in range(shadows + 1)]
    assert len({one["FAILOVER_LOCK_PATH"] for one in environments}) == 1
    plain = {"name": "", "planned": (), "ports": (), "startup": None, "liveness": None, "readiness": None}
    assert len({msgspec.structs.replace(one, **plain) for one in pod.containers}) == 1
    for one in (*pod.init, *pod.containers):
        assert (one.mounts[0].volume, one.claims) == (pod.volumes[0], (pod.claims[0].name,))


def test_every_probe_asks_a_port_that_its_container_has() -> None:
    """By name; no two ports of a pod have one number or one name."""
    for text in (RIGHT, worker("failover: {enabled: true, numShadows: 3}")):
        for pod in pods(accepted(text)):
            ports = [port for one in pod.containers for port in one.ports]
            assert len({port.name for port in ports}) == len({port.number for port in ports}) == len(ports)
            for one in pod.containers:
                assert all(question is not None for question in (one.startup, one.liveness, one.readiness))
                asked = {q.port for q in (one.startup, one.liveness, one.readiness) if q is not None}
                assert asked == {port.name for port in one.ports}


def test_a_plan_reads_back() -> None:
    """It can be written down and handed to another process."""
    planned = pods(accepted(worker("failover: {enabled: true}\nreadinessProbe: {exec: {command: [a]}}")))
    assert msgspec.json.decode(msgspec.json.encode(planned), type=list[Pod]) == planned
