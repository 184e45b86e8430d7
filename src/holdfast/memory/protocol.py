"""The messages between a vault and its clients, and between a vault and its keeper.

A client opens every connection to a vault with `Hello` and one descriptor: its own pidfd. (Fact 4d: `SO_PEERPIDFD`
names the process which connected, not the one that holds the socket.) The client numbers its calls, and the vault
answers each once. Notices have no number and answer no call.
"""

from __future__ import annotations

import msgspec

from holdfast.memory.layout import Layout
from holdfast.wire.connection import Versions

VERSION = 1
VERSIONS = Versions(VERSION, VERSION)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; each kind has its own tag."""


class Call(Message, frozen=True):
    """A numbered request, or the answer with the same number."""

    call: int


# -- client to vault


class Hello(Message, frozen=True, tag=1):
    """Introduces a client. `resume` is set if it was connected before the vault died, and says what it has mapped."""

    version: int
    client: str  # a unique name chosen by the client; the same after reconnecting
    engine_id: int
    pid: int
    resume: Resume | None = None
    last_version: int = 0  # the newest that the client speaks; 0: `version` is the only one
    features: tuple[str, ...] = ()


class Resume(Message, frozen=True):
    layout_hash: str | None  # the weights it has mapped
    epoch: int | None  # the pool it owns


class AskWeights(Call, frozen=True, tag=2):
    mode: str  # "rw", "ro", "rw_or_ro", "drop"
    timeout_ms: int
    wait_for_writer: bool = False
    replace: str | None = None


class AddSlabs(Call, frozen=True, tag=3):
    """Hands over a writer's slabs, in order; one descriptor each."""

    sizes: list[int]


class CommitWeights(Call, frozen=True, tag=4):
    layout: Layout


class ReleaseWeights(Call, frozen=True, tag=5):
    """Release the weights lock, held or waited for."""


class FetchSlabs(Call, frozen=True, tag=6):
    """Asks for the descriptors of a reader's generation; answered by `Slabs` frames until `more` is false."""


class AcquirePool(Call, frozen=True, tag=7):
    epoch: int
    geometry: str
    timeout_ms: int


class AddPoolSlabs(Call, frozen=True, tag=8):
    """Hands over a new pool's slabs; the very first descriptor is the index's. `last` completes the pool."""

    sizes: list[int]
    last: bool


class FetchPool(Call, frozen=True, tag=9):
    """Asks for the pool's index and pages; answered like `FetchSlabs`."""


class Mapping(Call, frozen=True, tag=10):
    """This process maps the device's pages, as part of the engine of `epoch` (None: a standby)."""

    epoch: int | None


class Quiesced(Call, frozen=True, tag=11):
    """Says that a planned handover is prepared: device drained, write access dropped."""

    epoch: int


class CancelCall(Call, frozen=True, tag=12):
    """Cancels the call that the client no longer waits for."""

    waiting: int


class GetStatus(Call, frozen=True, tag=13):
    """Asks for the vault's status."""


class Donate(Call, frozen=True, tag=14):
    """After vault and keeper both died, an engine donates the layout and descriptors of the weights it maps."""

    layout: Layout
    last: bool


class DonatePool(Call, frozen=True, tag=15):
    """After vault and keeper both died, the pool's owner donates index and pages, in order, and stays the owner."""

    epoch: int
    geometry: str
    sizes: list[int]
    last: bool
    made_epoch: int = 0  # the epoch under which its pages were made


class Leave(Message, frozen=True, tag=17):
    """Announces an intended disconnect: this process no longer touches the vault's memory."""


class Demote(Call, frozen=True, tag=18):
    """Moves the weights from the device to host memory; answered by `Moved` when the device's memory is free."""


class Promote(Call, frozen=True, tag=19):
    """Moves the weights back to the device; answered by `Moved` when they can be read."""


FromClient = (
    Hello | AskWeights | AddSlabs | CommitWeights | ReleaseWeights | FetchSlabs | AcquirePool | AddPoolSlabs
    | FetchPool | Mapping | Quiesced | CancelCall | GetStatus | Donate | DonatePool | Leave | Demote | Promote
)  # fmt: skip

# -- vault to client


class Welcome(Message, frozen=True, tag=101):
    """Answers `Hello`. `resumed`: the vault still keeps what the client has mapped."""

    version: int
    device: str
    vault: str  # id of this vault process
    resumed: bool
    pool_epoch: int = 0  # the last granted epoch that this vault knows of
    features: tuple[str, ...] = ()  # those that both sides have


class Failed(Call, frozen=True, tag=102):
    """Refuses a call. Call 0 refuses the connection, which is then closed."""

    code: str
    reason: str


class Done(Call, frozen=True, tag=103):
    """Confirms that a call was carried out."""


class WeightsGranted(Call, frozen=True, tag=104):
    """Grants the weights lock. `mode` is "rw" or "ro"; "ro" includes the layout."""

    mode: str
    generation: int
    layout: Layout | None = None


class WeightsEmpty(Call, frozen=True, tag=105):
    """Says that the vault has no weights and no session writes any."""


class Slabs(Call, frozen=True, tag=106):
    """Some of the requested slabs, in order, one descriptor each. A pool's slabs come with its geometry and the epoch
    it was made under."""

    sizes: list[int]
    more: bool
    made_epoch: int = 0
    geometry: str = ""


class PoolGranted(Call, frozen=True, tag=107):
    """Grants the pool. `adopt`: there is the last owner's pool, made under `made_epoch` (0: make a new one)."""

    epoch: int
    adopt: bool
    made_epoch: int


class Status(Call, frozen=True, tag=108):
    facts: bytes  # JSON


class Moved(Call, frozen=True, tag=109):
    """Says that the weights have been moved. `took_ms` is the whole duration, `copy_ms` that of the copy."""

    size_bytes: int
    copy_ms: float
    took_ms: float


class Superseded(Message, frozen=True, tag=120):
    """Tells readers that newer weights are committed; theirs stay while they hold them."""

    by_hash: str


class Fence(Message, frozen=True, tag=121):
    """Tells the pool's owner that a fence has passed; `kind` is "cpu" or "gpu"."""

    kind: str
    epoch: int


class LetGo(Message, frozen=True, tag=125):
    """Asks readers to release their weights: another session waits for the memory. They stay while held."""


# The kinds of `PoolNews`.
OWNER_GONE = "owner_gone"  # the owner of `epoch` has ended or quiesced
MADE = "made"  # the pool is complete and can be fetched; made under `epoch`
GRANTED = "granted"  # `epoch` owns it
DROPPED = "dropped"  # there is no pool any more


class Deposed(Message, frozen=True, tag=122):
    """Tells a client that reconnected as owner of the pool under `epoch` that it is not: it must stop writing."""

    epoch: int
    reason: str


class PoolNews(Message, frozen=True, tag=123):
    """Tells every mapper of a change of the pool. A hint, sent before the keeper knows: ask before
    acting."""

    kind: str
    epoch: int


FromVault = (
    Welcome | Failed | Done | WeightsGranted | WeightsEmpty | Slabs | PoolGranted | Status | Moved
    | Superseded | Fence | PoolNews | Deposed | LetGo
)  # fmt: skip

# -- vault and keeper


class Put(Call, frozen=True, tag=201):
    """Stores a record with its descriptors. `more`: further parts follow; the last part makes it valid."""

    key: str
    blob: bytes
    more: bool


class Drop(Call, frozen=True, tag=202):
    key: str


class ListAll(Call, frozen=True, tag=203):
    """Asks for all records: the keeper sends a `Put` for each part of each record, then `KeeperDone`."""


class KeeperDone(Call, frozen=True, tag=204):
    """The keeper's answer to `Put` and `Drop`, and the end of a list."""


class End(Message, frozen=True, tag=205):
    """Tells the keeper to end, because the vault ends for good."""


ToKeeper = Put | Drop | ListAll | End
FromKeeper = Put | KeeperDone

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
from_vault: msgspec.msgpack.Decoder[FromVault] = msgspec.msgpack.Decoder(FromVault)
to_keeper: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

READ_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
