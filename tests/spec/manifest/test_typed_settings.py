"""A service's typed settings: the options of its command, under a manifest's names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_fields_here import MACHINE, looked_at, named

from holdfast.spec.launch import FrontendLaunch, WorkerLaunch
from holdfast.spec.manifest.addresses import address_of
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.typed import OPTIONS, WorkerBlock, manifest_name, words_of
from holdfast.spec.manifest.whole import whole
from tests.rigs.manifests import RIGHT, accepted, another, problems, worker

EXAMPLES = Path(__file__).parents[3] / "examples"
AT = "spec.services.Worker"
# What running deployments stand at. Another value here would replace every one of them.
SETS = {
    "failover.yaml": {"Frontend": "0434eaa6", "Worker": "d5141195"},
    "fleet.yaml": {"frontend": "b4ab661a", "words": "07beb3ef", "more-words": "b1e3d003"},
    "one-model.yaml": {"Frontend": "11989242", "Worker": "64493708"},
    "prefill-decode.yaml": {"Frontend": "11989242", "Decode": "e2eefa0d", "Prefill": "4d676017"},
    "two-models.yaml": {"Frontend": "13c0e2ea", "Small": "6fd16667", "Large": "4341f55b"},
    "upgrade-v1.yaml": {"Frontend": "0434eaa6", "Worker": "aefd98c4"},
    "upgrade-v2.yaml": {"Frontend": "0434eaa6", "Worker": "646e558f"},
}


def test_the_set_of_a_manifest_with_args_stays_what_it_was() -> None:
    """A new version of Holdfast does not roll the deployments that run."""
    for name, sets in SETS.items():
        manifest = accepted((EXAMPLES / name).read_text())
        assert {service: address_of(manifest, service).hash8 for service in manifest.spec.services} == sets, name


def args(words: tuple[str, ...]) -> str:
    return worker(f"extraPodSpec: {{mainContainer: {{args: {msgspec.json.encode(words).decode()}}}}}")


TYPED = [
    (flag, another(one)) for flag, one in OPTIONS["worker"].items() if manifest_name(flag) not in WorkerBlock.refused
]


@pytest.mark.parametrize(("flag", "value"), TYPED, ids=lambda one: one if isinstance(one, str) else "")
def test_typed_settings_and_the_args_that_mean_the_same_are_one_set(flag: str, value: object) -> None:
    """The hash is the same, so that a manifest may go from args to typed settings without a rollout; and so are the
    processes, or the reason why there are none."""
    typed = worker(f"worker: {{engine: sim, {manifest_name(flag)}: {msgspec.json.encode(value).decode()}}}")
    if flag == "--engine":
        typed = worker(f"worker: {{engine: {value}}}")
    given = accepted(typed).spec.services["Worker"].given
    spelt = args(words_of("worker", given))
    assert str(address_of(accepted(typed), "Worker")) == str(address_of(accepted(spelt), "Worker"))
    assert pods(accepted(typed))[1].containers[0].words == pods(accepted(spelt))[1].containers[0].words
    if looked_at(typed).manifest is None:
        assert looked_at(spelt).manifest is None
    else:
        assert whole(accepted(typed), MACHINE, (), named) == whole(accepted(spelt), MACHINE, (), named)


def test_a_number_is_not_rounded_on_its_way() -> None:
    """Not in the launch, nor in the words that the hash is made of."""
    text = worker("worker: {engine: sim, simTpotMs: 0.123456789}")
    (launch,) = [one for one in whole(accepted(text), MACHINE, (), named) if isinstance(one, WorkerLaunch)]
    assert launch.sim.tpot_ms == 0.123456789
    assert pods(accepted(text))[1].containers[0].words[-1] == "--sim-tpot-ms=0.123456789"
    assert words_of("worker", {"--sim-tpot-ms": 0.1, "--sim-ttft-ms": 2.0})[2:] == (
        *("--sim-ttft-ms=2", "--sim-tpot-ms=0.1"),
    )


def test_the_order_of_settings_does_not_count() -> None:
    """Nor does a value that is the default."""
    one = worker("worker: {engine: sim, simRevision: 2, simQueue: 3}")
    other = worker("worker: {simQueue: 3, simRevision: 2, simTtftMs: 50}")
    assert address_of(accepted(one), "Worker") == address_of(accepted(other), "Worker")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker: {kvGb: 1}", "worker.kvGb: there is no such field; did you mean kvGib?"),
        ("worker: {kvGib: '1'}", "worker.kvGib: must be a number, got '1'; write it without quotes"),
        ("worker: {kvGib: -1}", "worker.kvGib: must be 0 or more, got -1"),
        ("worker: {kv: valt}", "worker.kv: must be one of vault, direct, got 'valt'; did you mean vault?"),
        ("worker: {lock: /l}", "worker.lock: is for the plan to say; leave it out"),
        (
            "worker: {servedName: x}",
            "worker.servedName: the service's modelName says it; write modelName, beside worker",
        ),
        (
            "frontend: {port: 1}",
            "frontend: is not for a worker, whose settings are called worker; leave it out",
        ),
        (
            "worker: {engine: sim}\nextraPodSpec: {mainContainer: {args: [--engine, sim]}}",
            "extraPodSpec.mainContainer.args: the settings are in worker, and args would be a second place for them; "
            "leave args out, or worker",
        ),
        (
            "worker: {engine: sim}\nextraPodSpec: {mainContainer: {command: [python3]}}",
            "extraPodSpec.mainContainer.command: the settings are in worker, and command would be a second place for "
            "them; leave command out, or worker",
        ),
        (
            "worker: {engine: vllm, vllmOption: [--enable-lora]}",
            "worker.vllmOption[0]: LoRA adapters are not supported (--enable-lora); "
            "serve the merged model under a name of its own",
        ),
    ],
)
def test_what_is_wrong_with_typed_settings_is_told_by_path(text: str, said: str) -> None:
    """With the line, the name that was probably meant, and the mend."""
    (problem,) = problems(worker(text))
    assert problem.partition(": ")[2] == f"{AT}.{said}"


def test_an_option_without_effect_is_refused_under_its_name_in_the_manifest() -> None:
    """As on a command line, in the manifest's own words."""
    (problem,) = looked_at(worker("worker: {engine: sim, kvGib: 1}")).problems
    assert problem.path == f"{AT}.worker"
    assert problem.what.startswith("kvGib is for engine torch or vllm and does nothing for sim")


def test_an_api_key_in_a_manifest_is_refused() -> None:
    """It is a secret: the refusal shows how to refer to one."""
    text = RIGHT.replace("componentType: frontend", "componentType: frontend\n      frontend: {apiKey: [x]}")
    (problem,) = problems(text)
    assert "a manifest holds no secrets; refer to one: envs: [{name: HOLDFAST_API_KEYS" in problem


def test_a_frontends_typed_port_is_the_one_it_listens_on() -> None:
    """On this machine, and the port that probes ask in a pod."""
    text = RIGHT.replace("componentType: frontend", "componentType: frontend\n      frontend: {port: 9123, drainS: 7}")
    (launch,) = [one for one in whole(accepted(text), MACHINE, (), named) if isinstance(one, FrontendLaunch)]
    assert (launch.address, launch.drain_s) == ("tcp://127.0.0.1:9123", 7.0)
    assert pods(accepted(text))[0].containers[0].ports[0].number == 9123
