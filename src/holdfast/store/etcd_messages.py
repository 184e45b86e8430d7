"""etcd's JSON gateway: the shapes of its requests and answers that we use.

msgspec turns bytes into base64 and back; numbers come as strings and are read leniently. Fields that etcd leaves out
are its zero values.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

# gRPC's numbers for what we must tell apart.
CODE_CANCELLED = 1
CODE_NOT_FOUND = 5
CODE_RESOURCE_EXHAUSTED = 8
# Cancelled, DeadlineExceeded, Unavailable: another member, or the same one later, may answer.
CODES_TRY_AGAIN = frozenset({CODE_CANCELLED, 4, 14})


class EtcdUnreachable(Exception):
    """No endpoint answered, or those that did cannot serve now."""


class EtcdError(Exception):
    """etcd understood and declined."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0


class RangeRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    range_end: bytes = b""
    limit: int = 0
    revision: int = 0
    count_only: bool = False


class RangeResponse(msgspec.Struct, frozen=True):
    header: Header
    kvs: list[KeyValue] = []
    more: bool = False


class PutRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes
    value: bytes
    lease: int = 0


class DeleteRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    key: bytes


class GrantRequest(msgspec.Struct, frozen=True):
    TTL: int


class GrantResponse(msgspec.Struct, frozen=True):
    ID: int


class LeaseRequest(msgspec.Struct, frozen=True):
    ID: int


class KeepAlive(msgspec.Struct, frozen=True):
    TTL: int = 0  # 0: there is no such lease any more


class KeepAliveResponse(msgspec.Struct, frozen=True):
    result: KeepAlive


class Empty(msgspec.Struct, frozen=True):
    """An answer of which only the arrival matters."""


class Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class WatchResult(msgspec.Struct, frozen=True):
    header: Header
    created: bool = False
    canceled: bool = False
    fragment: bool = False  # more of the same revision follows
    events: list[Event] = []


class StreamError(msgspec.Struct, frozen=True):
    message: str = ""
    grpc_code: int = 2


class WatchLine(msgspec.Struct, frozen=True):
    result: WatchResult | None = None
    error: StreamError | None = None


Answer = TypeVar("Answer")


def read(body: bytes, kind: type[Answer]) -> Answer:
    """An answer of etcd's; what cannot be read did not come from etcd."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EtcdError(2, f"the answer is not etcd's: {error}") from error


def range_end(prefix: bytes) -> bytes:
    """The first key after every key with this prefix; a single NUL means: to the end of the keyspace."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def watch_request(prefix: bytes, start_revision: int) -> object:
    """Fragments keep each line small, however much one revision changed."""
    create = {
        "key": prefix or b"\0",
        "range_end": range_end(prefix),
        "start_revision": start_revision,
        "fragment": True,
    }
    return {"create_request": create}


def delete_if_leased(key: bytes, lease: int) -> object:
    """A transaction that deletes a key only while it hangs on this lease."""
    compare = {"key": key, "target": "LEASE", "result": "EQUAL", "lease": lease}
    return {"compare": [compare], "success": [{"request_delete_range": {"key": key}}]}
