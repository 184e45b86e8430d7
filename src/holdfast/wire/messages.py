"""Defines the messages between frontend and worker, and their encoding.

Every connection opens with `Hello` and its answer `Welcome` or `Refused`. `Hello` carries the range of versions that
the client speaks, `Welcome` the version that both use. The frontend chooses a new stream number for every attempt, so
output of an old attempt is ignored.

Processes of two versions of Holdfast run beside each other, so fields are only appended, with defaults, and a message
with a new tag is sent only to a peer that announced its feature (`Versions.features`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.core.requests import GenerateRequest, Output
from holdfast.wire.connection import Versions
from holdfast.wire.frames import reader

VERSION = 2
VERSIONS = Versions(VERSION, VERSION)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The client's first frame. `purpose` is "data", "canary" (as data, for canary questions: they are accepted even
    when all places are taken) or "beat"."""

    version: int
    purpose: str
    peer: str
    last_version: int = 0  # the newest that the client speaks; 0: `version` is the only one
    features: tuple[str, ...] = ()


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a worker's process, for observers on the same machine."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    beat_thread: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The worker's answer to a `Hello`: its identity and capacity."""

    version: int
    instance: int
    namespace: str
    checksum: str
    concurrency: int
    queue: int
    deterministic: bool
    process: ProcessIdentity
    active: bool = True  # False: a standby; it gets work once it sends `Active`
    epoch: int = 0  # of its leadership; 0 without a group
    group: str = ""  # engines of one group take over from each other; only one of them is active
    # Answers are comparable only between engines of equal build, dtype and kind of device.
    build: str = ""
    dtype: str = ""
    device: str = ""  # its kind
    weights: str = ""  # equal only for engines that read the same weights in memory
    load: int = 0  # grows each time those weights are loaded; 0: an older version that does not report it
    vocabulary: int = 0  # token ids are below this
    gpus: tuple[tuple[str, str], ...] = ()  # PCI address and UUID of each one it uses
    doubt: str = ""  # why its answers may be wrong, though it serves; "": no known reason
    asleep: bool = False  # a standby that takes no part in the election
    features: tuple[str, ...] = ()  # those that both sides have


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Tells why the connection or a message was refused; the connection closes after it."""

    code: str
    reason: str


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks for a stream. It is refused if the worker already has `places` streams, of all clients (0: the worker's
    own limit). One that has not begun to run after `wait_ms` is refused as if there were no place (0: no limit)."""

    stream: int
    request: GenerateRequest
    places: int = 0
    wait_ms: int = 0


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=5):
    streams: list[int]


class Step(msgspec.Struct, array_like=True, tag=6):
    """The outputs of one engine step for this connection's streams."""

    outputs: list[Output]


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Says that these streams ended on the worker without a final output."""

    streams: list[int]


class Draining(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Says that the worker accepts no more work; its remaining streams fail with EngineShutdown."""

    reason: str


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A heartbeat, sent by its own thread (facts 31). `stuck_ms`: how long work has been running without progress in
    steps, less the time the engine's thread was runnable but got no CPU."""

    count: int
    steps: int
    stuck_ms: float
    step_ms_p99: float
    budget_ms: float
    running: int
    waiting: int
    tokens: int = 0  # generated since the start, canaries included
    load: int = 0  # as in `Welcome`
    blocks: int = 0  # of KV, in total
    blocks_free: int = 0


class GetArtefact(msgspec.Struct, frozen=True, array_like=True, tag=10):
    sha256: str


class ArtefactPart(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A piece of an artefact; `total` 0 means the worker does not have it."""

    sha256: str
    offset: int
    total: int
    data: bytes


class NotTaken(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Tells why a frontend cannot accept this worker's card; the worker shows it in its health."""

    reason: str


class Active(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Says that a standby took over: it leads its group under this epoch and accepts work from now on. Sent again if
    its answers turn out to be in doubt."""

    epoch: int
    doubt: str = ""  # as in `Welcome`


class Room(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Reserves places, for a moment, for a frontend that had a request refused (WorkerOverloaded). It sends as many
    requests, or fewer and a `Pass`; after that it sends nothing before the next `Room`."""

    places: int


class Pass(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Takes a frontend out of the queue for places. `turned_away` is the number of refusals that it has received on
    this connection: if the worker has sent more, the frontend stays queued for those. None: an older version without
    it."""

    turned_away: int | None = None


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Checks whether the engine's own loop is alive: the loop answers with `Pong`, without a forward pass."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=17):
    number: int


class Reload(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Sent on a canary connection after wrong answers: compare the weights with what was written, and reload them if
    they differ, unless their load is above `load` already. Allowed with the worker's token, and for this user and root
    on the same machine."""

    load: int
    in_place: bool = False  # no other worker serves: streams wait for this one
    reason: str = ""
    token: str = ""


class Reloaded(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """The outcome of a `Reload`, as text, and the weights' load now: larger if they were reloaded."""

    load: int
    outcome: str
    right: bool = False  # they were compared with what was written, and match


class Failing(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The last message on a beat connection: the worker met a permanent failure (a persistent device error, a lost
    rank) and exits now."""

    reason: str


class StepDown(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Sent on a canary connection: hand over to a standby and exit, because this process fails or answers wrongly. If
    not `believed`, the standby must not use anything that this process computed. Allowed as for `Reload`."""

    believed: bool
    reason: str = ""
    token: str = ""


ToWorker = Hello | Generate | Cancel | GetArtefact | NotTaken | Pass | Ping | Reload | StepDown
ToFrontend = (
    Welcome | Refused | Step | Closed | Draining | Beat | ArtefactPart | Active | Room | Pong | Reloaded | Failing
)
Message = ToWorker | ToFrontend


def answer_hello(hello: Hello, welcome: Welcome) -> Welcome | str:
    """Return the worker's answer in the newest version that both sides speak, or the reason to refuse the client."""
    version = VERSIONS.agree(hello)
    if version is None:
        return VERSIONS.refusal(hello, "this worker")
    return msgspec.structs.replace(welcome, version=version, features=VERSIONS.common_features(hello))


decode_to_worker: Callable[[memoryview], ToWorker] = reader(ToWorker)
decode_to_frontend: Callable[[memoryview], ToFrontend] = reader(ToFrontend)
