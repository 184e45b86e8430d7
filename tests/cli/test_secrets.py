"""API keys of deployments, with real processes: a missing secret starts nothing, keys are never lost."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from holdfast.settings import read_environment
from holdfast.testing.rig import fetch
from tests.rigs.cli.up_rig import Asker, UpRig

MANIFEST = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: keyed}
spec:
  services:
    Frontend:
      componentType: frontend
      replicas: 2
      extraPodSpec: {mainContainer: {image: "holdfast:1.0"}}
    Worker:
      componentType: worker
      modelName: holdfast-sim
      extraPodSpec: {mainContainer: {args: [--engine, sim]}}
"""
REFERENCE = "envs: [{name: HOLDFAST_API_KEYS, valueFrom: {secretKeyRef: {name: door, key: api-keys}}}]"
REFERS = MANIFEST.replace("      replicas: 2\n", f"      replicas: 2\n      {REFERENCE}\n")
FIRST, SECOND = "first-secret-key", "second-secret-key"
ROLLOUT_S = 300.0  # on a machine with much else to do


def asked(rig: UpRig, key: str = "") -> int:
    """The status of a request for the list of models."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return fetch(f"127.0.0.1:{rig.port}", "/v1/models", timeout_s=60.0, **headers)[0]


def roll_out(rig: UpRig, file: Path) -> None:
    command = rig.command("apply", "-f", str(file), "--wait")
    assert rig.start("apply", command).wait(ROLLOUT_S) == 0, rig.log("apply") + rig.logs()


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.processes
def test_keys_are_resolved_and_survive_the_supervisor(rig: UpRig, tmp_path: Path) -> None:
    """A secret that is missing starts nothing. Keys from the variable of the first `up` hold though the supervisor is
    killed, started again without the variable and told to replace the frontends; keys from a secret's file replace them
    by a rollout; no value is in the store or in a log."""
    plain, refers = tmp_path / "plain.yaml", tmp_path / "refers.yaml"
    plain.write_text(MANIFEST)
    refers.write_text(REFERS)
    up = ("up", "-f", str(plain), "--detach", "--port", str(rig.port))

    refused = rig.run("up", "-f", str(refers), "--detach", "--port", str(rig.port))
    assert refused.returncode == 78, refused.stderr
    for part in ("'door'", "'api-keys'", f"{rig.folder}/secrets/door/api-keys", "HOLDFAST_API_KEYS"):
        assert part in refused.stderr, refused.stderr
    assert not rig.pids()

    rig.env["HOLDFAST_API_KEYS"] = FIRST
    begun = rig.run(*up)
    assert begun.returncode == 0, begun.stderr
    assert (asked(rig), asked(rig, FIRST)) == (401, 200)
    del rig.env["HOLDFAST_API_KEYS"]

    rig.lose_supervisor()
    again = rig.run(*up)
    assert again.returncode == 0, again.stderr
    plain.write_text(MANIFEST.replace(":1.0", ":2.0"))
    with Asker(rig) as without_key:
        roll_out(rig, plain)
    assert without_key.statuses <= {0, 401}, without_key.statuses
    assert (asked(rig), asked(rig, FIRST)) == (401, 200)

    folder = rig.folder / "secrets" / "door"
    folder.mkdir(parents=True)
    (folder / "api-keys").write_text(f"{SECOND}\n")
    with Asker(rig) as without_key:
        roll_out(rig, refers)
    assert without_key.statuses <= {0, 401}, without_key.statuses
    assert (asked(rig), asked(rig, FIRST), asked(rig, SECOND)) == (401, 401, 200)

    written = [path for path in rig.folder.rglob("*") if path.is_file() and path.parent != folder]
    having = {path for path in written if any(key.encode() in path.read_bytes() for key in (FIRST, SECOND))}
    assert {path.name for path in having if path.suffix != ".launch"} == {"secrets.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in having} == {0o600}


def test_keys_are_separated_by_commas_or_line_breaks() -> None:
    """A secret's file with one key per line means what `--api-key-file` means by it."""
    assert read_environment({"HOME": "/", "HOLDFAST_API_KEYS": "a, b\r\n\nc\n"}).api_keys == ("a", "b", "c")
