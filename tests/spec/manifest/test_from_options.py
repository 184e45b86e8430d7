"""What options ask for, as a manifest: `up -f` serves the same with it as `up` with the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.cli.start import UpCommand
from holdfast.core.errors import Refused
from holdfast.roles.model_names import named
from holdfast.spec.arguments import by_path, options_of
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, Launch, StoredLaunch, WorkerLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.from_options import manifest_from, text_from
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.parts import as_plain
from holdfast.spec.manifest.whole import whole
from holdfast.spec.manifest.yaml_text import in_yaml
from holdfast.spec.plan import plan
from holdfast.spec.settings import Setting, filled
from tests.rigs.manifests import another

STATE = Path("/tmp/hf")
PLAIN = UpCommand(spec=DeploymentSpec("local"))
OPTIONS = options_of(PLAIN, "up")
# Of the command or of this machine, or about a fleet: no process of a manifest has them.
ELSEWHERE = {
    *("--config", "--filename", "--detach", "--untied", "--dry-run", "--device", "--api-key-file", "--status-port"),
    *("--store", "--backend", "--address", "--wait-s", "--controls"),
    *(flag for flag in OPTIONS if flag.startswith("--node")),
}
VALUES: dict[str, Any] = {"--spares": "2", "--api-key": ("k",), "--cors-origin": ("*",), "--canary-prompts": "/c.json"}
VALUES |= {"--deployment": "chat", "--model": "tiny", "--standbys": 2, "--chat-template": "/t.jinja"}
VALUES |= {"--shed-retry-s": 5.0}


def placed(launch: Launch) -> Launch:
    """A launch without what says where it is: names, addresses, locks, sets."""
    same: dict[str, Any] = {"name": "", "probes": Launch().probes, "env": (), "status_address": ""}
    if isinstance(launch, WorkerLaunch):
        failover = replace(launch.failover, vault_socket="", more_vaults=())
        same |= {"address": "", "beat_address": "", "group": "", "lock": "", "set_hash": "", "failover": failover}
        same |= {"cache_dir": ""}
    if isinstance(launch, ControlLaunch):  # a manifest's control counts the workers that it sees
        slo = replace(launch.levels.slo, workers=0)
        same |= {"levels": replace(launch.levels, slo=slo)}
    return replace(launch, **same)


def serving(launches: list[Launch]) -> list[Launch]:
    kinds = (WorkerLaunch, FrontendLaunch, ControlLaunch)
    found = [placed(one) for one in launches if isinstance(one, StoredLaunch)]
    return sorted(found, key=lambda one: next(index for index, kind in enumerate(kinds) if isinstance(one, kind)))


@pytest.mark.parametrize("flag", [flag for flag in OPTIONS if flag not in ELSEWHERE])
def test_every_option_of_up_starts_the_same_processes_by_a_manifest(flag: str) -> None:
    """Each with a value that is not its default, and the engine that reads it."""
    option: Setting = OPTIONS[flag]
    engines = option.extra.get("engines", ("sim",)) if flag != "--engine" else ("torch",)
    value = VALUES.get(flag, another(option) if flag != "--engine" else "torch")
    said = {"--engine": engines[0], flag: value}
    spec = filled(PLAIN, by_path(OPTIONS, said)).spec
    source, model = named(spec.worker.engine, spec.worker.source, spec.worker.model)
    spec = replace(spec, worker=replace(spec.worker, source=source, model=model))
    environ = {"HOME": "/", **({"HOLDFAST_API_KEYS": "k"} if flag == "--api-key" else {})}
    by_manifest = whole(manifest_from(spec), Machine(STATE, environ), (), named)
    assert serving(by_manifest) == serving(plan(STATE, spec))


def test_what_is_printed_is_read_as_the_same_manifest() -> None:
    """And so is a manifest that is written out from its structs."""
    spec = DeploymentSpec("local", workers=2, standbys=3)
    manifest = manifest_from(spec)
    assert check(text_from(spec).encode()).manifest == manifest
    assert check(in_yaml(as_plain(manifest)).encode()).manifest == manifest


def test_a_secret_is_a_reference() -> None:
    """Its value is nowhere in the text."""
    plain = DeploymentSpec("chat")
    token = {"engine_token": "hush-2"}
    spec = replace(
        plain,
        frontend=replace(plain.frontend, api_keys=("hush-1",)),
        worker=replace(plain.worker, **token),
        control=replace(plain.control, **token),
    )
    assert "hush" not in text_from(spec)
    names = {
        name: [(one.name, one.value_from.secret_key_ref) for one in service.envs if one.value_from is not None]
        for name, service in manifest_from(spec).spec.services.items()
    }
    assert {name: [one[0] for one in found] for name, found in names.items()} == {
        "worker": ["HOLDFAST_ENGINE_TOKEN"],
        "frontend": ["HOLDFAST_API_KEYS"],
        "control": ["HOLDFAST_ENGINE_TOKEN"],
    }


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (DeploymentSpec("a", controls=0), "--controls 0 cannot be written"),
        (DeploymentSpec("a", backend="local"), "leave --backend out"),
        (DeploymentSpec("Capital"), "metadata.name"),
    ],
)
def test_what_no_manifest_can_say_is_refused(spec: DeploymentSpec, said: str) -> None:
    """With the option, before anything is printed."""
    with pytest.raises(Refused, match=said):
        manifest_from(spec)
