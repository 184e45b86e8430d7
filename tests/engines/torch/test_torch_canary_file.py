"""The file of canaries' known answers: keyed by all that can change them, and named where it is to blame."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from engine_rig import Vault
from torch_rig import Rig

from holdfast.core.errors import UserError
from holdfast.engines.torch.canary import KINDS_MAX, answers_in, code_identity, known_answer


def test_the_first_answer_counts(tmp_path: Path) -> None:
    """For its kind; another kind has its own."""
    path = answers_in(tmp_path)
    assert known_answer(path, "a", (1, 2)) == (1, 2)
    assert known_answer(path, "a", (3, 4)) == (1, 2)
    assert known_answer(path, "b", (3, 4)) == (3, 4)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "b"}', '{"a": [1.5]}'])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    """With what is to be done about it."""
    path = answers_in(tmp_path)
    path.write_text(content)
    with pytest.raises(UserError, match=r"canaries\.json does not hold .*remove it"):
        known_answer(path, "a", (1, 2))


def test_an_answer_that_cannot_be_kept_ends_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that takes no more costs a warning, which names the file."""
    path = answers_in(tmp_path)
    path.mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        known_answer(path, "a", (1, 2))
    assert known_answer(tmp_path / "gone" / "canaries.json", "a", (1, 2)) == (1, 2)
    assert "canaries.json" in caplog.text


def test_kinds_are_bounded(tmp_path: Path) -> None:
    """The oldest goes first."""
    path = answers_in(tmp_path)
    for number in range(KINDS_MAX + 1):
        known_answer(path, str(number), (number,))
    kept = json.loads(path.read_text())
    assert (len(kept), "0" in kept, str(KINDS_MAX) in kept) == (KINDS_MAX, False, True)


async def test_the_key_holds_all_that_can_change_the_answer(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another block size, another context or other code is another kind, so that none of them is called damaged."""
    for number, (code, settings) in enumerate([("x", {}), ("x", {"context_tokens_max": 64}), ("y", {})], 1):
        monkeypatch.setattr("holdfast.engines.torch.readiness.code_identity", lambda code=code: code)
        r = Rig(vault, **settings)
        await r.load()
        await r.engine.stop()
        known = msgspec.json.decode(answers_in(vault.folder).read_bytes(), type=dict[str, list[int]])
        assert len(known) == number
        assert r.tenant.canary.known_from == str(answers_in(vault.folder))
    key = next(iter(known))
    for part in ("float32", "exact, blocks of 16", "4096 positions", "1 ranks", "code x", "cpu, torch ", "threads"):
        assert part in key
    assert len(code_identity()) == 16


async def test_a_damaged_file_is_named_when_an_engine_starts(vault: Vault) -> None:
    """Whoever reads the log knows what to remove."""
    answers_in(vault.folder).write_text("{")
    r = Rig(vault)
    with pytest.raises(UserError, match=r"canaries\.json"):
        await r.load()
    await r.engine.stop()
