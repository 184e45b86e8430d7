"""Defines socket addresses and their text form: `tcp://127.0.0.1:9000` or `unix:///run/x.sock`."""

from __future__ import annotations

from dataclasses import dataclass

# Linux keeps socket paths in 108 bytes with a closing NUL.
UNIX_PATH_BYTES_MAX = 107


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Return the address in `text`; raise ValueError with the error and a valid example."""
    scheme, found, rest = text.partition("://")
    if not found or scheme not in ("tcp", "unix"):
        raise ValueError(f"address {text!r} must start with tcp:// or unix://, e.g. tcp://127.0.0.1:9000")
    if scheme == "unix":
        if not rest.startswith("/"):
            raise ValueError(f"unix address needs an absolute path, got {rest!r}")
        if len(rest.encode()) > UNIX_PATH_BYTES_MAX:
            mend = "choose a shorter state directory"
            raise ValueError(f"unix socket path is longer than {UNIX_PATH_BYTES_MAX} bytes: {rest!r}; {mend}")
        return UnixAddress(rest)
    host, found, port_text = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise ValueError(f"address {text!r} needs host:port with a port of 0 to 65535, e.g. tcp://127.0.0.1:9000")
    return TcpAddress(host, int(port_text))
