"""A manifest that is written out again is read as what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.yaml_text import in_yaml, plain

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
# Words that one reader of YAML or another takes for something else.
TRAPS = ("1e3", "010", "0o7", "yes", "No", "~", "null", "1_0", "0x1f", "1:30", "2026-01-01", "-", "", "a: b", "# no")
KEYS = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
WORDS = st.one_of(st.sampled_from(TRAPS), st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp"))))
SAID = st.dictionaries(
    KEYS,
    st.recursive(
        st.one_of(WORDS, st.integers(-(10**17), 10**17), st.booleans(), st.none()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=6,
    ),
    min_size=1,
)


@given(SAID)
def test_what_is_written_is_read_as_it_was(said: dict[str, Any]) -> None:
    """Whatever words are in it, and in any order of names."""
    assert plain(in_yaml(said)) == said
    assert plain(in_yaml(said, in_order_of_names=True)) == said


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_stays_the_same_manifest(file: Path) -> None:
    """Read, written out and read again."""
    text = file.read_text()
    assert check(in_yaml(plain(text)).encode()).manifest == check(text.encode()).manifest
