"""Addresses of sockets, written as people write them: `tcp://127.0.0.1:9000` or `unix:///run/x.sock`."""

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
    """Read an address; a ValueError names what is wrong and shows a right one."""
    scheme, found, rest = text.partition("://")
    if not found or scheme not in ("tcp", "unix"):
        raise ValueError(f"address {text!r} must start with tcp:// or unix://, e.g. tcp://127.0.0.1:9000")
    if scheme == "unix":
        return _parse_unix(rest)
    return _parse_tcp(text, rest)


def _parse_unix(path: str) -> UnixAddress:
    if not path.startswith("/"):
        raise ValueError(f"unix address needs an absolute path, got {path!r}")
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise ValueError(
            f"unix socket path is longer than {UNIX_PATH_BYTES_MAX} bytes: {path!r}; choose a shorter state directory"
        )
    return UnixAddress(path)


def _parse_tcp(text: str, rest: str) -> TcpAddress:
    host, found, port_text = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise ValueError(f"address {text!r} needs host:port with a port of 0 to 65535, e.g. tcp://127.0.0.1:9000")
    return TcpAddress(host, int(port_text))
