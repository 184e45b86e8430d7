"""On this machine, too, every field that is accepted does something or is warned about."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_manifest_fields import FIELDS, MAIN, SECRET, manifest_with
from test_manifest_secrets import Source

from holdfast.rollout.revision import revision_of
from holdfast.spec.manifest.addresses import address_of
from holdfast.spec.manifest.checking import Checked, check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.whole import findings, whole, without_effect
from tests.rigs.manifests import accepted

SECRETS = Source({"s": {"k": "one", "l": "two"}, "t": {"k": "three"}})
MACHINE = Machine(Path("/tmp/hf"), {"HOME": "/"}, secret_source=SECRETS)
MISSING = {"name": "s", "key": "missing"}
TEMPLATE = {"args": ["--chat-template", "t"]}
# Of those the manifests of the other table say what is so here anyway.
HERE = FIELDS | {
    "MainContainer.args": (f"{MAIN}.args", None, ["--sim-tpot-ms", "1"]),
    "MainContainer.workingDir": (MAIN, TEMPLATE, TEMPLATE | {"workingDir": "/w"}),
    "SecretKey.optional": (SECRET, MISSING, MISSING | {"optional": True}),
    "Service.livenessProbe": ("spec.services.Worker.livenessProbe", None, {"httpGet": {"port": 1, "path": "/live"}}),
}


def named(_engine: str, source: str, model: str) -> tuple[str, str]:
    return source, model


def looked_at(text: str) -> Checked:
    return check(text.encode(), (partial(findings, machine=MACHINE),), (without_effect,))


def outcome(text: str) -> Any:
    """All that comes of it here but for hashes: what is wrong with it, or its processes, and how they roll."""
    found = looked_at(text)
    if found.manifest is None:
        return found.problems
    manifest = found.manifest
    launches = str(msgspec.to_builtins(whole(manifest, MACHINE, (), named)))
    for name in manifest.spec.services:
        launches = launches.replace(address_of(manifest, name).hash8, "HASH")
    parts = revision_of(manifest, 1).parts.values()
    warned = [warning.path for warning in found.warnings]
    return launches, [msgspec.structs.replace(part, set_id="") for part in parts], warned


@pytest.mark.parametrize("field", HERE)
def test_every_field_does_something_here_or_is_warned_about(field: str) -> None:
    """Another value gives other processes, another rollout or another refusal; or somebody is told that it does not."""
    path, before, after = HERE[field]
    if outcome(manifest_with(path, before)) != outcome(manifest_with(path, after)):
        return
    told = [warning.path for warning in looked_at(manifest_with(path, after)).warnings]
    written = path.replace(".0", "[0]")
    assert any(written.startswith(one) or one.startswith(written) for one in told), told


def test_what_a_prefill_worker_does_here_is_told() -> None:
    """It serves as the decode workers do, and whoever wrote it hears that nothing is handed over."""
    text = (Path(__file__).parents[3] / "examples" / "prefill-decode.yaml").read_text()
    accepted(text)
    (warning,) = looked_at(text).warnings
    assert warning.path == "spec.services.Prefill.subComponentType"
    assert "it serves whole requests, as decode workers do" in str(warning)
