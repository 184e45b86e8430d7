"""Where components stand: what gives one a new address, and what does not; and that nobody shares another's."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.discovery.keys import admits
from holdfast.spec.manifest.addresses import address_of, peers_of
from holdfast.spec.manifest.parts import NAME
from holdfast.spec.manifest.types import Manifest, Metadata
from tests.rigs.manifests import RIGHT, accepted, worker

PLAIN = accepted(RIGHT)


def address(text: str, service: str = "Worker") -> str:
    return str(address_of(accepted(text), service))


def test_an_address_is_made_of_what_a_component_is() -> None:
    """Deployment, hash, type, and kind if there is one; the endpoint comes behind."""
    plain = address_of(accepted(RIGHT), "Worker")
    assert str(plain) == f"chat-{plain.hash8}/worker"
    assert plain.endpoint("generate") == f"chat-{plain.hash8}/worker/generate"
    assert admits("chat", plain.namespace)
    assert address(worker("subComponentType: decode")).endswith("/worker-decode")
    assert address(RIGHT, "Frontend").endswith("/frontend")


@pytest.mark.parametrize(
    "text",
    [
        RIGHT.replace("chat", "chat  # a comment"),
        worker("replicas: 7"),
        worker("replicas: 1"),
        worker("rollout: {maxSurge: 3, paused: true}"),
        worker("fleet: {replicasMin: 1, floor: warm, hostGib: 1, nodes: [a], autoscale: {enabled: true}}"),
        worker("failover: {enabled: false}"),
        worker("extraPodSpec: {mainContainer: {}}"),
        worker("envs: []"),
        worker("envs: [{name: DYN_NAMESPACE, value: x}]"),
        worker("dynamoNamespace: elsewhere"),
        RIGHT.replace('gpu: "1"', "gpu: 1"),
        RIGHT.replace("componentType: frontend", "componentType: frontend\n      replicas: 3"),
        RIGHT + "    Other: {componentType: worker}\n",
    ],
)
def test_what_changes_nothing_for_a_worker_is_the_same_set(text: str) -> None:
    """How many there are, how they are replaced, what others are, what is idle, how it is written."""
    assert address(text) == address(RIGHT)


CHANGES = [
    "modelName: m",
    "subComponentType: decode",
    "envs: [{name: A, value: x}]",
    "envs: [{name: A, value: y}]",
    "envFromSecret: s",
    "failover: {enabled: true}",
    "failover: {enabled: true, numShadows: 2}",
    "fleet: {memoryGib: 2}",
    "extraPodSpec: {mainContainer: {image: 'i:2'}}",
    "extraPodSpec: {mainContainer: {args: [--connector, lmcache]}}",
    "extraPodSpec: {mainContainer: {args: [--connector, nixl]}}",
    "extraPodSpec: {terminationGracePeriodSeconds: 5}",
]


def test_whatever_a_worker_is_told_gives_it_a_set_of_its_own() -> None:
    """Model, kind, variables, image, arguments, failover: each change another address."""
    addresses = [address(RIGHT), *(address(worker(change)) for change in CHANGES)]
    assert len(set(addresses)) == len(addresses)


def test_variables_count_where_they_arrive() -> None:
    """The deployment's are every service's; of two the container's own counts; where it is written does not."""
    variable = "[{name: A, value: x}]"
    inside = worker(f"extraPodSpec: {{mainContainer: {{env: {variable}}}}}")
    everywhere = RIGHT + f"  envs: {variable}\n"
    assert address(worker(f"envs: {variable}")) == address(inside) == address(everywhere) != address(RIGHT)
    assert address(inside + "  envs: [{name: A, value: other}]\n") == address(inside)
    assert address(everywhere, "Frontend") != address(RIGHT, "Frontend")


def test_two_services_alike_are_two_sets() -> None:
    """A service's name counts: two with the same words are replaced each for itself."""
    manifest = accepted(RIGHT + '    Other:\n      componentType: worker\n      resources: {limits: {gpu: "1"}}\n')
    assert address_of(manifest, "Worker") != address_of(manifest, "Other")


def test_whom_a_frontend_serves_counts_for_it_alone() -> None:
    """`shares` is told to frontends."""
    shared = RIGHT + "  shares: [talk]\n"
    assert address(shared) == address(RIGHT)
    assert address(shared, "Frontend") != address(RIGHT, "Frontend")


@given(st.lists(st.from_regex(NAME[0], fullmatch=True), min_size=2, max_size=4, unique=True))
def test_two_deployments_never_share_an_address(names: list[str]) -> None:
    """The same components under two names: no namespace of one is another's, however alike the names are."""
    for one, other in itertools.permutations(names, 2):
        namespace = address_of(replace(PLAIN, metadata=Metadata(one)), "Worker").namespace
        assert admits(one, namespace)
        assert not admits(other, namespace)


def of(text: str) -> Manifest:
    return accepted(RIGHT + "".join(f"    {line}\n" for line in text.strip().splitlines()))


def test_peers_are_found_by_what_they_are() -> None:
    """Prefill and decode workers of one model, whatever they are called; others have none."""
    manifest = of("""
Zeta: {componentType: worker, subComponentType: prefill, modelName: m}
Alpha: {componentType: worker, subComponentType: decode, modelName: m}
Beta: {componentType: worker, subComponentType: decode, modelName: m}
Gamma: {componentType: worker, subComponentType: decode, modelName: other}
Delta: {componentType: planner, subComponentType: decode}
""")
    found = {name: peers_of(manifest, name) for name in manifest.spec.services}
    assert found["Zeta"] == ["Alpha", "Beta"]
    assert found["Alpha"] == found["Beta"] == ["Zeta"]
    assert not any(found[name] for name in ("Worker", "Frontend", "Gamma", "Delta"))
