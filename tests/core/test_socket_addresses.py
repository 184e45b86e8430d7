"""Addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.address import UNIX_PATH_BYTES_MAX, TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:9000", TcpAddress("127.0.0.1", 9000)),
        ("tcp://localhost:0", TcpAddress("localhost", 0)),
        ("tcp://[::1]:80", TcpAddress("::1", 80)),
        ("unix:///run/x.sock", UnixAddress("/run/x.sock")),
    ],
)
def test_an_address_reads_and_writes_the_same(text: str, address: TcpAddress | UnixAddress) -> None:
    """What is parsed prints as it was written."""
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:9000",
        "http://x:1",
        "tcp://",
        "tcp://x",
        "tcp://:80",
        "tcp://x:",
        "tcp://x:99999",
        "tcp://x:-1",
        "tcp://x:٣",
        "unix://x",
        "unix://",
        "unix:///" + "x" * UNIX_PATH_BYTES_MAX,
    ],
)
def test_a_wrong_address_says_what_is_wrong(text: str) -> None:
    """Never anything but a ValueError with a mend in it."""
    with pytest.raises(ValueError, match=r"e\.g\.|absolute path|shorter state directory"):
        parse_address(text)


@given(st.text())
def test_no_text_does_worse_than_a_value_error(text: str) -> None:
    """Whatever an operator or a record says, the answer is an address or a ValueError."""
    for scheme in ("", "tcp://", "unix://", "unix:///"):
        try:
            parse_address(scheme + text)
        except ValueError:
            continue


@given(st.integers(0, 65535))
def test_every_port_is_a_port(port: int) -> None:
    """0 to 65535, all of them."""
    assert parse_address(f"tcp://h:{port}") == TcpAddress("h", port)
