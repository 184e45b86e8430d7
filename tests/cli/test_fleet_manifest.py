"""A whole manifest onto a fleet: its workers are wished for, and other commands say what to use in their place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.cli.fleet.manifest import fleet_spec
from holdfast.core.errors import REFUSED
from holdfast.fleet.desired import Level
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from tests.rigs.cli.fleet_terminal import DEPLOYMENT, SIM, Desk, desk_at

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"
TEXT = EXAMPLE.read_text()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_at(tmp_path) as made:
        yield made


async def test_each_worker_of_a_manifest_becomes_a_wish(desk: Desk) -> None:
    """As `deploy -f` makes one; applied again nothing changes, and what the manifest does not have stays."""
    assert (await desk.say("deploy", "other", *SIM)).returncode == 0
    dry = await desk.say("apply", "-f", str(EXAMPLE), "--dry-run")
    assert dry.stdout.count("(dry run)") == 2
    assert await desk.find_desired("words") is None
    done = await desk.say("apply", "-f", str(EXAMPLE))
    assert (done.returncode, done.stderr) == (0, ""), done
    words, more = await desk.desired("words"), await desk.desired("more-words")
    assert (words.name, words.model.wanted, words.model.replicas_max) == ("words", 1, 3)
    assert (more.model.wanted, more.model.floor, more.scaling is not None) == (0, Level.COLD, True)
    assert "other is not in it, and not changed" in done.stdout
    again = await desk.say("apply", "-f", str(EXAMPLE))
    assert again.stdout.count("unchanged") == 2
    assert (await desk.desired("words")).model.generation == 1


async def test_one_model_of_it_may_be_deployed_alone(desk: Desk, tmp_path: Path) -> None:
    """The same service alone is the same version."""
    await desk.say("apply", "-f", str(EXAMPLE))
    before = await desk.desired("words")
    alone = tmp_path / "alone.yaml"
    head, _, rest = TEXT.partition("    frontend:\n")
    alone.write_text(head + "    words:" + rest.partition("    words:")[2].partition("    more-words:")[0])
    assert (await desk.say("deploy", "-f", str(alone))).returncode == 0
    assert (await desk.desired("words")).model.version == before.model.version


async def test_a_difference_is_shown_by_model(desk: Desk, tmp_path: Path) -> None:
    """Status 1 where something would change, 0 where nothing would."""
    await desk.say("apply", "-f", str(EXAMPLE))
    assert (await desk.say("diff", "-f", str(EXAMPLE))).returncode == 0
    other = tmp_path / "other.yaml"
    other.write_text(TEXT.replace("replicasMax: 3", "replicasMax: 4"))
    told = await desk.say("diff", "-f", str(other))
    assert told.returncode == 1
    assert "model words, generation 1" in told.stdout
    assert "+        replicasMax: 4" in told.stdout


async def test_what_is_for_deployments_says_what_to_use(desk: Desk) -> None:
    """`get` and `delete` know a fleet when they see one."""
    for words in (("get",), ("get", DEPLOYMENT), ("delete", DEPLOYMENT)):
        told = await desk.say(*words)
        assert told.returncode == 1, words
        assert f"{DEPLOYMENT} is a fleet, whose models `holdfast get models` shows" in told.stderr


async def test_mistakes_are_told_before_anything_is_asked_for(desk: Desk, tmp_path: Path) -> None:
    """Of all services at once."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(TEXT.replace("--vault-gib", "--vaultgib"))
    told = await desk.say("apply", "-f", str(wrong))
    assert told.returncode == REFUSED
    assert await desk.find_desired("words") is None
    nobody = tmp_path / "nobody.yaml"
    nobody.write_text(TEXT.partition("    words:")[0])
    told = await desk.say("apply", "-f", str(nobody))
    assert "a fleet serves models, and no service here is a worker" in told.stderr


async def test_two_services_of_one_name_are_refused_by_both_their_names(desk: Desk, tmp_path: Path) -> None:
    """By `apply` and by `up`, before anything is asked for or started; also where the other is in the fleet already."""
    twice = tmp_path / "twice.yaml"
    twice.write_text(TEXT.replace("modelName: more-words", "modelName: words"))
    both = "words and more-words are both served as 'words', and clients could not tell them apart"
    for words in (("apply",), ("apply", "--dry-run"), ("up", "--backend", "local")):
        told = await desk.say(*words, "-f", str(twice), store=words[0] != "up")
        assert (told.returncode, both in told.stderr) == (REFUSED, True), told
        assert "spec.services.more-words.modelName" in told.stderr
    assert not (tmp_path / "state").exists()
    assert (await desk.say("deploy", "other", *SIM, "--served-name", "more-words")).returncode == 0
    told = await desk.say("apply", "-f", str(EXAMPLE))
    assert told.returncode == 1
    assert "other is served as 'more-words' already; give more-words another name" in told.stderr
    assert await desk.find_desired("words") is None, "nothing of a manifest is asked for that cannot be as a whole"


async def test_what_traffic_has_scaled_stays_where_the_manifest_says_the_same(desk: Desk, tmp_path: Path) -> None:
    """An autoscaled model's `replicas` is where it begins: applied again, nobody who serves is sent away."""
    assert (await desk.say("apply", "-f", str(EXAMPLE))).returncode == 0
    assert (await desk.say("scale", "more-words", "1")).returncode == 0  # as its traffic does
    assert (await desk.say("scale", "words", "2")).returncode == 0
    again = await desk.say("apply", "-f", str(EXAMPLE))
    assert "model more-words unchanged: version" in again.stdout, again
    assert [(await desk.desired(key)).model.wanted for key in ("more-words", "words")] == [1, 1]
    other = tmp_path / "other.yaml"
    other.write_text(TEXT.replace("replicas: 0", "replicas: 1"))
    assert (await desk.say("apply", "-f", str(other))).returncode == 0
    assert (await desk.say("apply", "-f", str(EXAMPLE))).returncode == 0
    assert (await desk.desired("more-words")).model.wanted == 0, "another number is somebody's word"


async def test_what_apply_does_not_change_is_told(desk: Desk, tmp_path: Path) -> None:
    """A fleet's own processes; and a manifest of another name is for no fleet."""
    told = await desk.say("apply", "-f", str(EXAMPLE))
    assert "frontend: as `holdfast up` started it; models alone are changed while a fleet runs" in told.stdout
    other = tmp_path / "other.yaml"
    other.write_text(TEXT.replace("name: local", "name: other"))
    desk.env["HOLDFAST_STATE_DIR"] = "/tmp/hf-nobody"  # short enough for sockets, and nobody makes it
    told = await desk.say("apply", "-f", str(other))
    assert told.returncode == 1
    assert "there is none, and a fleet local, for manifests of that name" in told.stderr


async def test_models_may_swap_their_names(desk: Desk, tmp_path: Path) -> None:
    """In one manifest, since it is asked for as a whole."""
    assert (await desk.say("apply", "-f", str(EXAMPLE))).returncode == 0
    other = TEXT.replace("modelName: more-words", "modelName: x").replace("modelName: words", "modelName: more-words")
    swapped = tmp_path / "swapped.yaml"
    swapped.write_text(other.replace("modelName: x", "modelName: words"))
    assert (await desk.say("apply", "-f", str(swapped))).returncode == 0
    assert [(await desk.desired(key)).name for key in ("words", "more-words")] == ["more-words", "words"]


async def test_who_waits_for_a_manifest_hears_of_all_its_models(desk: Desk, tmp_path: Path) -> None:
    """What was asked for is told first; one that does not come hides nothing of the others."""
    large = tmp_path / "large.yaml"
    large.write_text(TEXT.replace("memoryGib: 0.2}", "memoryGib: 99}", 1))
    told = await desk.say("apply", "-f", str(large), "--wait", "--timeout", "20")
    assert (told.returncode, told.stdout.count(" deployed: ")) == (1, 2), told
    assert "more-words: 0 HOT, 0 desired, version" in told.stdout
    assert "words: " in told.stderr
    assert "99" in told.stderr


def test_frontends_and_planners_of_it_are_the_fleets_own() -> None:
    """As many as it has, told what it tells them."""
    loud = "      extraPodSpec: {mainContainer: {args: [--access-log]}}\n"
    text = TEXT.replace("replicas: 1\n    words", f"replicas: 2\n{loud}    words")
    text = text.replace("    words:", "    planner: {componentType: planner, replicas: 2}\n    words:", 1)
    manifest = check(text.encode()).manifest
    assert manifest is not None
    machine = Machine(Path("/tmp/hf"), {}, port=1234)
    spec = fleet_spec(DeploymentSpec("x", port=1234), manifest, machine)
    assert (spec.name, spec.port) == ("local", 1234)
    assert (spec.frontends, spec.frontend.access_log, spec.controls) == (2, True, 2)
