"""The messages between frontend and worker, and their encoding.

Every connection opens with `Hello` and its answer `Welcome` or `Refused`; the version is in both. A stream's
number is chosen by the frontend, fresh for every attempt, so output of an old attempt finds no taker.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.core.requests import GenerateRequest, Output
from holdfast.wire.frames import reader

VERSION = 2


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First frame of whoever connects. `purpose` is "data", "canary" (as data, for known questions: they are taken
    also when all places are) or "beat"."""

    version: int
    purpose: str
    peer: str


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker's process can be looked at, by someone on the same machine."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    beat_thread: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The worker's answer to a `Hello`: who it is and how much it takes."""

    version: int
    instance: int
    namespace: str
    checksum: str
    concurrency: int
    queue: int
    deterministic: bool
    process: ProcessIdentity
    active: bool = True  # False: a standby; it gets work once it says `Active`
    epoch: int = 0  # of the leader it is, 0 without a group
    group: str = ""  # engines of one group take over from each other; only one of them is active
    # What its answers may be compared with: only those of equal build, dtype and kind of device.
    build: str = ""
    dtype: str = ""
    device: str = ""  # its kind
    weights: str = ""  # whose they are: equal for engines that read the same memory, and for nobody else
    load: int = 0  # of those weights: grows with every fresh load; 0: an older version, which does not say
    vocabulary: int = 0  # token ids are below it
    gpus: tuple[tuple[str, str], ...] = ()  # that it computes on: PCI address and UUID of each
    doubt: str = ""  # why its answers may be wrong, though it serves; "": they are not known to be
    asleep: bool = False  # it stands by, and takes no part in the election


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Why the connection or a message was refused; the connection closes after it."""

    code: str
    reason: str


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request, and how many streams may be there, whosoever, for it to begin (0: as many as there are places). One
    that has not begun to run after `wait_ms` comes back as if there had been no place (0: it waits without a bound)."""

    stream: int
    request: GenerateRequest
    places: int = 0
    wait_ms: int = 0


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=5):
    streams: list[int]


class Step(msgspec.Struct, array_like=True, tag=6):
    """All that one engine step made for this connection's streams."""

    outputs: list[Output]


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """These streams are over on the worker although no last output was sent for them."""

    streams: list[int]


class Draining(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The worker takes no more work; streams it still had come back as failures with EngineShutdown."""

    reason: str


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Sent by a thread of its own (facts 31). `stuck_ms`: how long work has been running without the step
    count moving, less the time the engine's thread was runnable but got no CPU."""

    count: int
    steps: int
    stuck_ms: float
    step_ms_p99: float
    budget_ms: float
    running: int
    waiting: int
    tokens: int = 0  # made since the start by those that ran, canaries too
    load: int = 0  # as in `Welcome`
    blocks: int = 0  # of KV, whole
    blocks_free: int = 0


class GetArtefact(msgspec.Struct, frozen=True, array_like=True, tag=10):
    sha256: str


class ArtefactPart(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """One piece of an artefact; `total` 0 means the worker does not have it."""

    sha256: str
    offset: int
    total: int
    data: bytes


class NotTaken(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A frontend cannot admit this worker's card, and why: the worker shows it in its health."""

    reason: str


class Active(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A standby took over: it leads its group under this epoch and takes work from now on. Said again where its answers
    turn out to be in doubt."""

    epoch: int
    doubt: str = ""  # as in `Welcome`


class Room(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """To a frontend whose request was turned away (WorkerOverloaded): so many places are kept for it for a moment. It
    sends as many requests, or fewer and a `Pass`; after that it sends nothing before the next `Room`."""

    places: int


class Pass(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """A frontend wants no place in line any more, as far as it has heard: so many of its requests were turned away on
    this connection. Where there were more, it is in line for those. None: an older version, which does not say."""

    turned_away: int | None = None


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Is the engine's own loop alive? It answers by `Pong`, from there, without a forward pass."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=17):
    number: int


class Reload(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """On a canary's connection: its answers were wrong. Compare the weights with what was written, and load them anew
    if they are not that, unless their load is above `load` already. For who may pull a worker's levers: whoever has
    its token, and this user and root on the same machine."""

    load: int
    in_place: bool = False  # no other worker serves: streams wait for this one
    reason: str = ""
    token: str = ""


class Reloaded(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """What came of a `Reload`, in words, and the weights' load now: a larger one, if they were loaded anew."""

    load: int
    outcome: str
    right: bool = False  # they were compared with what was written, and are that


class Failing(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """On a beat connection, and the last on it: the worker met what no step can mend (a device error that stays, a lost
    rank), and exits now."""

    reason: str


class StepDown(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """On a canary's connection: hand over to a standby and exit, because this process fails or answers wrongly. Not
    `believed`: the standby is to use nothing that this process computed. For the same callers as `Reload`."""

    believed: bool
    reason: str = ""
    token: str = ""


ToWorker = Hello | Generate | Cancel | GetArtefact | NotTaken | Pass | Ping | Reload | StepDown
ToFrontend = (
    Welcome | Refused | Step | Closed | Draining | Beat | ArtefactPart | Active | Room | Pong | Reloaded | Failing
)
Message = ToWorker | ToFrontend

decode_to_worker: Callable[[memoryview], ToWorker] = reader(ToWorker)
decode_to_frontend: Callable[[memoryview], ToFrontend] = reader(ToFrontend)
