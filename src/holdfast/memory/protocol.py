"""The messages between a vault and its clients, and between a vault and its keeper.

Every connection to a vault opens with `Hello` and one descriptor, its own pidfd (fact 4d: `SO_PEERPIDFD` names who
connected, not who holds the socket). Calls carry a number of the client's; every call is answered once. Notices come
unasked and have no number.
"""

from __future__ import annotations

import msgspec

from holdfast.memory.layout import Layout

VERSION = 1


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Everything that is sent; each kind has a tag of its own."""


class Call(Message, frozen=True):
    """What is asked under a number, and what is answered under it."""

    call: int


# -- client to vault


class Hello(Message, frozen=True, tag=1):
    """Who connects. With `resume` set it was here before the vault died, and says what it has mapped."""

    version: int
    client: str  # its own choice, unique; the same over reconnects
    engine_id: int
    pid: int
    resume: Resume | None = None


class Resume(Message, frozen=True):
    layout_hash: str | None  # the weights it has mapped
    epoch: int | None  # the pool it owns


class AskWeights(Call, frozen=True, tag=2):
    mode: str  # "rw", "ro", "rw_or_ro", "drop"
    timeout_ms: int
    wait_for_writer: bool = False
    replace: str | None = None


class AddSlabs(Call, frozen=True, tag=3):
    """A writer's slabs, in order; one descriptor each."""

    sizes: list[int]


class CommitWeights(Call, frozen=True, tag=4):
    layout: Layout


class ReleaseWeights(Call, frozen=True, tag=5):
    """Let go of the weights, held or waited for."""


class FetchSlabs(Call, frozen=True, tag=6):
    """A reader asks for the descriptors of its generation; answered by `Slabs` frames until `more` is false."""


class AcquirePool(Call, frozen=True, tag=7):
    epoch: int
    geometry: str
    timeout_ms: int


class AddPoolSlabs(Call, frozen=True, tag=8):
    """The owner of a fresh pool hands over its pages; with `last` the pool is complete. The first descriptor of all
    is the index's."""

    sizes: list[int]
    last: bool


class FetchPool(Call, frozen=True, tag=9):
    """A mapper asks for the pool's index and pages; answered as `FetchSlabs` is."""


class Mapping(Call, frozen=True, tag=10):
    """This process maps the device's pages, as part of the engine of `epoch` (None: a standby)."""

    epoch: int | None


class Quiesced(Call, frozen=True, tag=11):
    """A planned handover: device drained, write access dropped."""

    epoch: int


class CancelCall(Call, frozen=True, tag=12):
    """A wait the client has given up."""

    waiting: int


class GetStatus(Call, frozen=True, tag=13):
    """What the vault would say of itself."""


class Donate(Call, frozen=True, tag=14):
    """Vault and keeper both died: a mapped engine gives the weights' record and descriptors back."""

    layout: Layout
    last: bool


class DonatePool(Call, frozen=True, tag=15):
    """Vault and keeper both died: the pool's owner gives index and pages back, in order, and goes on owning it."""

    epoch: int
    geometry: str
    sizes: list[int]
    last: bool
    made_epoch: int = 0  # under which its pages were made


class Leave(Message, frozen=True, tag=17):
    """The connection's end that follows is meant: this process touches nothing of the vault's any more."""


class Demote(Call, frozen=True, tag=18):
    """The weights are to leave the device for host memory; answered by `Moved` when its memory is given back."""


class Promote(Call, frozen=True, tag=19):
    """The weights are to be on the device again; answered by `Moved` when they can be read."""


FromClient = (
    Hello | AskWeights | AddSlabs | CommitWeights | ReleaseWeights | FetchSlabs | AcquirePool | AddPoolSlabs
    | FetchPool | Mapping | Quiesced | CancelCall | GetStatus | Donate | DonatePool | Leave | Demote | Promote
)  # fmt: skip

# -- vault to client


class Welcome(Message, frozen=True, tag=101):
    """`resumed`: what the client had mapped is still what the vault keeps."""

    version: int
    device: str
    vault: str  # this vault process's own id
    resumed: bool
    pool_epoch: int = 0  # the last one granted, as far as this vault knows


class Failed(Call, frozen=True, tag=102):
    """A call refused; with call 0 the connection itself, which closes after it."""

    code: str
    reason: str


class Done(Call, frozen=True, tag=103):
    """It was carried out."""


class WeightsGranted(Call, frozen=True, tag=104):
    """`mode` is "rw" or "ro"; for "ro" the layout comes along."""

    mode: str
    generation: int
    layout: Layout | None = None


class WeightsEmpty(Call, frozen=True, tag=105):
    """Nothing is kept here, and nobody writes."""


class Slabs(Call, frozen=True, tag=106):
    """Some of the slabs asked for, in order, one descriptor each; a pool's with the epoch it was made under, and with
    its geometry."""

    sizes: list[int]
    more: bool
    made_epoch: int = 0
    geometry: str = ""


class PoolGranted(Call, frozen=True, tag=107):
    """`adopt`: pages and index of the last owner are there, made under `made_epoch` (0: they are to be made)."""

    epoch: int
    adopt: bool
    made_epoch: int


class Status(Call, frozen=True, tag=108):
    facts: bytes  # JSON


class Moved(Call, frozen=True, tag=109):
    """The weights are where they were asked to be. `took_ms` is all of it, `copy_ms` while bytes were on their way."""

    size_bytes: int
    copy_ms: float
    took_ms: float


class Superseded(Message, frozen=True, tag=120):
    """Notice to readers: newer weights are committed beside yours."""

    by_hash: str


class Fence(Message, frozen=True, tag=121):
    """Notice to a pool's owner: `kind` is "cpu" or "gpu"."""

    kind: str
    epoch: int


class LetGo(Message, frozen=True, tag=125):
    """Notice to readers: somebody waits to load weights anew in the place of yours, which stay while you hold them."""


# The kinds of `PoolNews`.
OWNER_GONE = "owner_gone"  # the owner of `epoch` has ended or stepped back
MADE = "made"  # the pool is complete and can be fetched; made under `epoch`
GRANTED = "granted"  # `epoch` owns it
DROPPED = "dropped"  # there is none any more


class Deposed(Message, frozen=True, tag=122):
    """Notice to one who came back as the pool's owner under `epoch`: it is not, and must write nothing more."""

    epoch: int
    reason: str


class PoolNews(Message, frozen=True, tag=123):
    """Notice to everyone with a mapper's seat, also upon taking it. A hint, ahead of the keeper: ask before acting."""

    kind: str
    epoch: int


FromVault = (
    Welcome | Failed | Done | WeightsGranted | WeightsEmpty | Slabs | PoolGranted | Status | Moved
    | Superseded | Fence | PoolNews | Deposed | LetGo
)  # fmt: skip

# -- vault and keeper


class Put(Call, frozen=True, tag=201):
    """Keep a record with its descriptors. In parts while `more`; it counts, whole, with the last part."""

    key: str
    blob: bytes
    more: bool


class Drop(Call, frozen=True, tag=202):
    key: str


class ListAll(Call, frozen=True, tag=203):
    """Everything that is kept: a `Put` for each part of each record, then `Kept`."""


class Kept(Call, frozen=True, tag=204):
    """The keeper's answer to Put, Drop, and the end of a list."""


class End(Message, frozen=True, tag=205):
    """The vault ends for good: the keeper is to end too."""


ToKeeper = Put | Drop | ListAll | End
FromKeeper = Put | Kept

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
from_vault: msgspec.msgpack.Decoder[FromVault] = msgspec.msgpack.Decoder(FromVault)
to_keeper: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

READ_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
