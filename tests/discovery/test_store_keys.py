"""Keys and namespaces: what keeps deployments and their generations apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.discovery.keys import (
    CARDS,
    INSTANCES,
    InstanceKey,
    admits,
    parse_key,
)
from holdfast.spec.names import check_deployment_name, namespace_for

PART = st.text("abcdefgh-0123456789", min_size=1, max_size=12)


@given(PART, PART, PART, st.integers(0, 2**64 - 1))
def test_a_key_reads_back(namespace: str, component: str, endpoint: str, instance: int) -> None:
    """Every instance's path parses to that instance, under its own prefix only."""
    key = InstanceKey(namespace, component, endpoint, instance)
    assert parse_key(INSTANCES, INSTANCES + key.path) == key
    assert parse_key(CARDS, INSTANCES + key.path) is None


@given(st.text("v1/instance0x_+-aAfFgG ", max_size=40))
def test_an_instance_has_one_key_only(text: str) -> None:
    """Whatever parses is exactly what would be written: no second spelling of the same instance."""
    for key in (text, INSTANCES + "d-00000000/worker/generate/" + text):
        parsed = parse_key(INSTANCES, key)
        assert parsed is None or INSTANCES + parsed.path == key


@pytest.mark.parametrize("last", ["", "0x1f", "1F", "+1", "-1", " 1", "1_0", "01", "xyz", "1f/2", "f" * 17])
def test_other_spellings_are_no_keys(last: str) -> None:
    """Only lower-case hex without a sign, prefix, zero in front or excess is an instance."""
    assert parse_key(INSTANCES, f"{INSTANCES}d-00000000/worker/generate/{last}") is None


@pytest.mark.parametrize(
    ("deployment", "namespace", "expected"),
    [
        ("foo", "foo-0123abcd", True),
        ("foo", "foo-bar-0123abcd", False),
        ("foo-bar", "foo-bar-0123abcd", True),
        ("foo", "foo-0123ABCD", False),
        ("foo", "foo-0123abc", False),
        ("foo", "foo-0123abcde", False),
        ("foo", "foo-0123abcd\n", False),
        ("foo", "foo", False),
        ("foo", "xfoo-0123abcd", False),
        ("f.o", "foo-0123abcd", False),
    ],
)
def test_a_frontend_admits_its_own_deployment_only(deployment: str, namespace: str, expected: bool) -> None:
    """`foo` never captures `foo-bar` (facts 19)."""
    assert admits(deployment, namespace) is expected


@given(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True), st.dictionaries(PART, st.integers()))
def test_a_deployment_admits_what_it_launches(deployment: str, settings: dict[str, int]) -> None:
    """The namespace made for a deployment is admitted by it."""
    assert admits(deployment, namespace_for(deployment, settings))


def test_replicas_and_ports_do_not_make_a_generation() -> None:
    """How many run, and where, changes nothing; what runs does; the order it is written in does not."""
    base = namespace_for("d", {"engine": "sim", "model": "m", "replicas": 2, "port": 8000})
    assert base == namespace_for("d", {"port": 9000, "model": "m", "engine": "sim", "workers": 5, "host": "h"})
    assert base == namespace_for("d", {"model": "m", "engine": "sim", "ports": [1, 2]})
    assert base != namespace_for("d", {"engine": "sim", "model": "n"})
    assert base != namespace_for("d", {"engine": "sim", "model": "m", "dtype": "x"})


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a/b", "a\n", "a" * 64])
def test_a_deployment_name_that_cannot_be_a_key_is_refused(name: str) -> None:
    """The refusal quotes the name and says what is allowed."""
    with pytest.raises(ValueError, match="must be 1-63 of a-z"):
        check_deployment_name(name)
    with pytest.raises(ValueError, match="must be 1-63 of a-z"):
        namespace_for(name, {})
