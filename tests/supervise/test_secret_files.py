"""The values of secrets on disk: read from one file per key, kept by hash, and readable by their owner alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from holdfast.core.errors import Refused
from holdfast.spec.manifest.checking import check
from holdfast.supervise.secrets import SecretFiles

TEXT = b"""
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: keyed}
spec:
  services:
    Frontend:
      componentType: frontend
      envs: [{name: HOLDFAST_API_KEYS, valueFrom: {secretKeyRef: {name: door, key: keys}}}]
"""


def test_values_are_kept_by_hash_until_no_revision_needs_them(tmp_path: Path) -> None:
    """A second start without the file and the variable finds them; the same value has the same hash, and the file is
    its owner's alone."""
    manifest = check(TEXT).manifest
    assert manifest is not None
    files = SecretFiles(tmp_path)
    assert files.digests(manifest, {}) == {}
    (tmp_path / "secrets" / "door").mkdir(parents=True)
    path = tmp_path / "secrets" / "door" / "keys"
    path.write_text("one\n")
    first = files.digests(manifest, {})
    assert files.digests(manifest, {}) == first
    assert files.kept(first["door/keys"]) == "one"
    assert files.last("door/keys") is None
    files.asked_with(first)
    path.write_text("two")
    second = files.digests(manifest, {})
    assert second != first
    files.asked_with(second, needed=first.values())
    path.unlink()
    again = SecretFiles(tmp_path)
    assert again.digests(manifest, {}) == second
    assert (again.kept(first["door/keys"]), again.last("door/keys")) == ("one", "two")
    again.asked_with(second, needed=())
    assert again.kept(first["door/keys"]) is None
    assert stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode) == 0o600
    again.forget()
    assert again.last("door/keys") is None


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """With the file and what to do; what is not there is no error."""
    files = SecretFiles(tmp_path, str(tmp_path / "own"))
    assert (files.read("door", "keys"), files.keys("door")) == (None, None)
    folder = tmp_path / "own" / "door"
    folder.mkdir(parents=True)
    (folder / "keys").write_bytes(b"\xff\xfe")
    (folder / "..data").write_text("of a mount")
    assert files.keys("door") == ("keys",)
    with pytest.raises(Refused, match="is not text in UTF-8"):
        files.read("door", "keys")
    (tmp_path / "secrets.json").write_text("{")
    with pytest.raises(Refused, match=r"secrets\.json cannot be read.*remove the file"):
        files.kept("1")
