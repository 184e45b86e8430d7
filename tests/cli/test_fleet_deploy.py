"""`holdfast deploy`: from its words, or a file, to what stands in a real store; and all that is wrong with them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.cli.fleet import observed
from holdfast.cli.fleet.deploy import Deploy
from holdfast.core.errors import REFUSED, UserError
from holdfast.fleet import desired_changes
from holdfast.fleet.desired import Level
from holdfast.fleet.desired_changes import remove_model
from holdfast.fleet.records import DesiredModel, desired_key
from holdfast.fleet.scaling import Scaling
from holdfast.spec.arguments import by_path, options_of
from holdfast.spec.commands import settings_from
from holdfast.spec.deployment import device_slot
from holdfast.spec.launch import VaultLaunch, WorkerLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.from_options import manifest_text
from holdfast.spec.manifest.local import Machine, replica_launches
from holdfast.spec.manifest.pods import pods
from holdfast.spec.settings import Setting, all_settings, filled
from holdfast.store.contract import Store
from tests.rigs.cli.fleet_terminal import DEPLOYMENT, GIB, SIM, Desk, desk_at
from tests.rigs.manifests import another

FILE = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: local}
spec:
  services:
    words:
      componentType: worker
      resources: {limits: {gpu: "1"}}
      failover: {enabled: true}
      extraPodSpec: {mainContainer: {args: [--engine, sim, --sim-revision, "1"]}}
      fleet: {replicasMax: 3, floor: warm, hostGib: 0.5, autoscale: {enabled: true, idleSeconds: 60}}
"""


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_at(tmp_path) as made:
        yield made


async def test_words_become_a_wish(desk: Desk) -> None:
    """With all that was said of it, the version that its pods have, and a manifest that makes its processes."""
    words = ("--min", "1", "--max", "4", "--wanted", "2", "--floor", "warm", "--host-gib", "0.75", "--dedicated")
    words += ("--node", "n1", "--per-node", "2", "--memory-gib", "1.5", "--sim-tpot-ms", "2.5", "--allow-chaos")
    done = await desk.say("deploy", "tiny", *SIM, *words, "--served-name", "small words", "--standbys", "0")
    assert done.returncode == 0, done
    desired = await desk.desired("tiny")
    assert done.stdout == f"model tiny deployed: version {desired.model.version}, 2 desired, served as small words\n"
    model = desired.model
    assert (desired.name, desired.scaling, model.generation) == ("small words", None, 1)
    assert (model.replicas_min, model.replicas_max, model.wanted, model.floor) == (1, 4, 2, Level.WARM)
    assert (model.dedicated, model.nodes, model.per_node_max, model.devices) == (True, frozenset({"n1"}), 2, 1)
    assert (model.device_bytes, model.host_bytes) == (3 * GIB // 2, 3 * GIB // 4)
    manifest = check(desired.manifest.encode()).manifest
    assert manifest is not None
    (pod,) = pods(manifest)
    assert (pod.service, pod.namespace) == ("tiny", f"{DEPLOYMENT}-{model.version}")
    vault, engine = replica_launches(pod, pod.replica(7), [device_slot((), 0)], Machine(Path("/tmp/x"), {"HOME": "/"}))
    assert isinstance(vault, VaultLaunch), "also without a standby its memory outlives it"
    assert isinstance(engine, WorkerLaunch)
    assert (engine.name, engine.model) == (f"local-tiny-{model.version}-7-engine-0", "small words")
    assert (engine.sim.tpot_ms, engine.sim.vault_gib, engine.allow_chaos) == (2.5, 0.5, True)


async def test_a_real_model_is_measured_or_must_be_told(desk: Desk, tmp_path: Path) -> None:
    """From its shape and its pool, if it is at hand; paths are whole, since engines start elsewhere."""
    done = await desk.say("deploy", "tiny", "--model", "tiny", "--kv-gib", "0.25", "--context", "512")
    assert done.returncode == 0, done
    desired = await desk.desired("tiny")
    assert desired.model.device_bytes > GIB // 4
    unknown = await desk.say("deploy", "other", "--model", "./nowhere")
    assert (unknown.returncode, unknown.stdout) == (REFUSED, "")
    why = "other: --memory-gib: how much memory it takes on each device is not known; "
    assert unknown.stderr.startswith(f"{why}say --kv-gib, if the model is on this machine, or --memory-gib\n")
    assert await desk.find_desired("other") is None
    known = await desk.say("deploy", "other", "--model", "./nowhere", "--memory-gib", "4")
    assert known.returncode == 0, known
    assert f"model: {Path.cwd()}/nowhere\n" in (await desk.desired("other")).manifest


async def test_scaling_has_its_words(desk: Desk) -> None:
    """All of them; and none does anything by itself."""
    words = "--scale-wait-s 1 --scale-kv-high 0.8 --scale-kv-low 0.4 --scale-up-after-s 2 --scale-down-after-s 3"
    words += " --scale-up-every-s 4 --scale-down-every-s 5 --scale-idle-s 6 --scale-devices-max 2"
    idle = await desk.say("deploy", "tiny", *SIM, *words.split())
    assert idle.returncode == REFUSED, idle
    assert idle.stderr.count(" does nothing without --autoscale; leave it out, or say that, too\n") == 9
    done = await desk.say("deploy", "tiny", *SIM, "--max", "2", "--autoscale", *words.split())
    assert done.returncode == 0, done
    times = {"high_s": 2.0, "low_s": 3.0, "step_up_s": 4.0, "step_down_s": 5.0, "idle_s": 6.0}
    said = Scaling(wait_s_max=1.0, kv_high=0.8, kv_low=0.4, devices_max=2, **times)
    assert (await desk.desired("tiny")).scaling == said


async def test_every_mistake_is_told_at_once(desk: Desk) -> None:
    """Each under its option, with the mend; and nothing is asked for."""
    words = ("--min", "3", "--max", "2", "--wanted", "5", "--floor", "warm", "--memory-gib", "1", "--devices", "2")
    wrong = await desk.say("deploy", "Tiny_Model", *SIM, *words, "--chat-template", "/nowhere")
    assert (wrong.returncode, wrong.stdout) == (REFUSED, ""), wrong
    told = [line.removeprefix("Tiny_Model: ") for line in wrong.stderr.splitlines()]
    assert sorted(told) == [
        "--chat-template /nowhere cannot be read: No such file or directory",
        "--devices: the simulator has one device, and not 2; leave it out",
        "--host-gib: a floor of WARM needs host memory, and how much is not given; give what the weights take, e.g. 16",
        "--max: must be 3 or more, as many as at least, got 2; leave it out, or ask for fewer at least",
        "--wanted: 5 replicas are desired, and at most 2 are allowed; ask for 2, or allow 5",
        "KEY must be 1 to 30 of a-z, 0-9 and '-', with no '-' at either end, got 'Tiny_Model'",
        "holdfast: Tiny_Model cannot be deployed: 6 mistakes",
    ]
    assert await desk.find_desired("Tiny_Model") is None


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("deploy", 2, "`holdfast deploy` needs KEY, what the model is called, or -f FILE"),
        ("deploy a --engine sim --kv-gib 1", REFUSED, "--kv-gib is for --engine torch or vllm and does nothing"),
        ("deploy a --engine sim --min 1 --floor cold", REFUSED, "--min: on disk there are no replicas"),
        ("deploy a --engine sim --standbys 2", REFUSED, "--standbys must be 0 to 1, got 2"),
        ("deploy a --engine sim --vault-gib 2 --host-gib 1", REFUSED, "--host-gib: its weights take 2 GiB at least"),
        ("deploy a --model tiny --kv-gib 1 --host-gib 0.0001", REFUSED, "--host-gib: its weights take 0.00"),
        ("deploy a --engine sim --floor tepid", 2, "--floor must be one of hot, warm, cold, got 'tepid'"),
        ("deploy a --engine sim --deployment elsewhere", 1, "there is no fleet 'elsewhere'; there is local"),
        ("deploy a --engine sim --timeout soon", 2, "--timeout is a time such as 90s, 1m30s or 2h; got 'soon'"),
        ("deploy a --engine sim --device cuda-0", 2, "`holdfast deploy` has no option --device"),
        ("deploy -f FILE --wanted 2", REFUSED, "--wanted is for the manifest to say"),
        ("deploy other -f FILE", REFUSED, "KEY is other, and the service in"),
    ],
)
async def test_mistakes_of_one_word(desk: Desk, words: str, status: int, said: str) -> None:
    """They are refused as everywhere."""
    file = desk.folder / "m.yaml"
    file.write_text(FILE)
    wrong = await desk.say(*words.replace("FILE", str(file)).split())
    assert (wrong.returncode, wrong.stdout) == (status, ""), wrong
    assert said in wrong.stderr


async def test_a_file_says_the_same(desk: Desk) -> None:
    """A manifest of one worker; one of anything else is told what a model is."""
    file = desk.folder / "m.yaml"
    file.write_text(FILE)
    done = await desk.say("deploy", "-f", str(file))
    assert (done.returncode, done.stderr) == (0, ""), done
    desired = await desk.desired("words")
    assert (desired.name, desired.manifest, desired.model.replicas_max) == ("holdfast-sim", FILE, 3)
    assert (desired.model.floor, desired.scaling) == (Level.WARM, Scaling(idle_s=60.0))
    file.write_text(FILE + "    Frontend: {componentType: frontend}\n")
    two = await desk.say("deploy", "-f", str(file))
    assert two.returncode == REFUSED
    assert "spec.services: a model is exactly one worker service; a fleet has frontends" in two.stderr
    assert "Frontend: a model's key" not in two.stderr, "it is none"
    file.write_text(FILE.replace("words:", "w" * 31 + ":").replace("hostGib: 0.5, ", ""))
    wrong = await desk.say("deploy", "-f", str(file))
    assert "fleet.hostGib: a floor of WARM needs host memory" in wrong.stderr, "before where it runs is looked at"


async def test_deployed_again_it_is_changed(desk: Desk) -> None:
    """The same is no change; another number is no other version, another engine or memory is; a number that nobody
    says stays as it was."""
    first = await desk.say("deploy", "tiny", *SIM, "--max", "4", "--wanted", "3")
    before = await desk.desired("tiny")
    version = before.model.version
    same = await desk.say("deploy", "tiny", *SIM, "--max", "4")
    assert same.stdout == f"model tiny unchanged: version {version}, 3 desired, served as tiny\n", (first, same)
    assert await desk.desired("tiny") == before
    fewer = await desk.say("deploy", "tiny", *SIM, "--max", "2", "--sim-jitter", "0.1")
    assert fewer.stdout == f"model tiny changed: the same version {version}, 2 desired, served as tiny\n"
    other = await desk.say("deploy", "tiny", *SIM, "--max", "2", "--sim-revision", "2")
    after = await desk.desired("tiny")
    changed = f"version {after.model.version} in place of {version}, 2 desired, served as tiny"
    assert other.stdout == f"model tiny changed: {changed}\n"
    assert (after.model.generation, after.model.version == version) == (3, False)
    await desk.say("deploy", "tiny", *SIM, "--max", "2", "--sim-revision", "2", "--memory-gib", "2")
    assert (await desk.desired("tiny")).model.version not in (version, after.model.version)


async def test_two_models_have_two_names(desk: Desk) -> None:
    """Clients could not say which one they mean."""
    assert (await desk.say("deploy", "one", *SIM)).returncode == 0
    taken = await desk.say("deploy", "two", *SIM, "--served-name", "one")
    assert taken.returncode == 1
    assert "one is served as 'one' already; give two another name (--served-name, or modelName" in taken.stderr
    assert await desk.find_desired("two") is None


async def test_of_two_who_change_it_at_once_nobody_is_lost(desk: Desk) -> None:
    """Each changes what it finds, in a process of its own, and the generation tells of both."""
    assert (await desk.say("deploy", "tiny", *SIM, "--max", "3")).returncode == 0
    words = (sys.executable, "-m", "holdfast", "scale", "tiny", "--store", desk.url)
    quiet = {"stdout": asyncio.subprocess.DEVNULL, "env": desk.env}
    both = [await asyncio.create_subprocess_exec(*words, wanted, **quiet) for wanted in ("2", "3")]
    assert [await one.wait() for one in both] == [0, 0]
    assert (await desk.desired("tiny")).model.generation == 3


async def test_what_may_keep_it_from_coming_is_told(desk: Desk) -> None:
    """A node that is not there, and memory that no device has: a warning, for nodes come and go."""
    done = await desk.say("deploy", "tiny", *SIM, "--node", "n2", "--memory-gib", "9")
    assert done.returncode == 0, done
    assert done.stderr == "tiny: warning: no node n2 is there now; there is n1\n"
    large = await desk.say("deploy", "tiny", *SIM, "--memory-gib", "9")
    needs = "each replica needs 9.00 GiB, and no node has that: the largest device has 8.00 GiB"
    assert large.stderr == f"tiny: warning: {needs}\n"


async def test_without_a_fleet_it_is_told_what_to_start(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing runs, and where a store runs that knows of none."""
    monkeypatch.setattr(observed, "FOUND_S", 0.1)
    nothing = await desk.say("deploy", "tiny", *SIM, store=False)
    assert nothing.returncode == 1
    assert "nothing runs in ~/state: start it with `holdfast up --backend local`, or name a store" in nothing.stderr
    (tmp_path / "e").mkdir()
    async with desk_at(tmp_path / "e") as other:
        await other.store.delete(f"v1/nodes/{DEPLOYMENT}/n1", 10.0)
        for words in (("deploy", "tiny", *SIM), ("models",), ("nodes",), ("scale", "tiny", "1"), ("evict", "tiny")):
            none = await other.say(*words)
            assert none.returncode == 1
            assert "knows of no fleet: start one with `holdfast up --backend local`" in none.stderr, none


OPTIONS = [one for one in options_of(Deploy(), "deploy").values() if one.path[0] == "worker"]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda one: one.flag)
def test_every_engine_option_reaches_its_worker(option: Setting) -> None:
    """The model's manifest has it typed, and its worker is started with the same value."""
    engine = option.extra.get("engines", ("sim",))[0]
    value = another(option) if option.name != "engine" else "vllm"
    asked_for = filled(Deploy(key="k"), by_path({option.flag: option}, {option.flag: value}))
    worker = asked_for.worker if option.name == "engine" else replace(asked_for.worker, engine=engine)
    text = manifest_text("local", {"k": asked_for._service(worker)})
    manifest = check(text.encode()).manifest
    assert manifest is not None
    read = settings_from(WorkerLaunch(model="", source=""), "worker", manifest.spec.services["k"].given)
    path = option.path[1:]
    assert {one.path: one.default for one in all_settings(read)}[path] == value


async def test_one_name_is_not_given_to_two_that_ask_at_the_same_instant(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's desired model stands in the store after it was looked for and before this one does: this one is taken
    back, and what was there before it is there again."""
    assert (await desk.say("deploy", "one", *SIM, "--served-name", "words")).returncode == 0
    rival = msgspec.json.encode(await desk.desired("one"))
    assert (await desk.say("evict", "one", "--forget")).returncode == 0
    assert (await desk.say("deploy", "two", *SIM)).returncode == 0
    before, real = await desk.desired("two"), desired_changes.update_desired

    async def late(
        store: Store, deployment: str, key: str, change: desired_changes.DesiredChange
    ) -> DesiredModel | None:
        await store.put(desired_key(deployment, "one"), rival, 10.0)
        return await real(store, deployment, key, change)

    monkeypatch.setattr(desired_changes, "update_desired", late)
    for key in ("two", "three"):
        await desk.store.delete(desired_key(DEPLOYMENT, "one"), 10.0)
        wrong = await desk.say("deploy", key, *SIM, "--served-name", "words")
        assert wrong.returncode == 1, wrong
        assert "one is served as 'words' already" in wrong.stderr
    assert (await desk.desired("two")).name == before.name == "two"
    assert await desk.find_desired("three") is None
    assert (await desk.desired("one")).name == "words"


class Meanwhile:
    """A store in which somebody else writes before the first swap that is asked of it."""

    def __init__(self, store: Store, key: str, value: bytes) -> None:
        self._store, self._others = store, [(key, value)]

    async def get(self, key: str, timeout_s: float) -> bytes | None:
        return await self._store.get(key, timeout_s)

    async def swap(self, key: str, value: bytes | None, expected: bytes | None, timeout_s: float) -> bool:
        while self._others:
            await self._store.put(*self._others.pop(), timeout_s)
        return await self._store.swap(key, value, expected, timeout_s)


async def test_what_is_deployed_at_the_same_instant_is_not_forgotten(desk: Desk) -> None:
    """What only has another number since it was read is."""
    assert (await desk.say("deploy", "tiny", *SIM)).returncode == 0
    desired, where = await desk.desired("tiny"), desired_key(DEPLOYMENT, "tiny")
    anew = replace(desired, at_unix_s=desired.at_unix_s + 1)
    meanwhile = Meanwhile(desk.store, where, msgspec.json.encode(anew))
    with pytest.raises(UserError, match="tiny was deployed again meanwhile, so it is not removed"):
        await desired_changes.update_desired(meanwhile, DEPLOYMENT, "tiny", remove_model("tiny"))  # type: ignore[arg-type]
    assert await desk.desired("tiny") == anew
    scaled = replace(anew, model=replace(anew.model, wanted=0, generation=9))
    meanwhile = Meanwhile(desk.store, where, msgspec.json.encode(scaled))
    assert await desired_changes.update_desired(meanwhile, DEPLOYMENT, "tiny", remove_model("tiny")) is None  # type: ignore[arg-type]
    assert await desk.find_desired("tiny") is None
