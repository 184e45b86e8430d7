"""The messages between a vault and its clients, and between a vault and its keeper.

Every connection to a vault opens with `Hello` and one descriptor, its own pidfd (fact 4d: `SO_PEERPIDFD` names who
connected, not who holds the socket). Calls carry a number of the client's; every call is answered once. Notices come
unasked and have no number.
"""

from __future__ import annotations

import msgspec

from holdfast.memory.layout import Layout

VERSION = 1

# -- client to vault


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Who connects. With `resume` set it was here before the vault died, and says what it has mapped."""

    version: int
    client: str  # its own choice, unique; the same over reconnects
    engine_id: int
    pid: int
    resume: Resume | None = None


class Resume(msgspec.Struct, frozen=True, array_like=True):
    layout_hash: str | None  # the weights it has mapped
    epoch: int | None  # the pool it owns


class AskWeights(msgspec.Struct, frozen=True, array_like=True, tag=2):
    call: int
    mode: str  # "rw", "ro", "rw_or_ro", "drop"
    timeout_ms: int
    wait_for_writer: bool = False
    replace: str | None = None


class AddSlabs(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A writer's slabs, in order; one descriptor each."""

    call: int
    sizes: list[int]


class CommitWeights(msgspec.Struct, frozen=True, array_like=True, tag=4):
    call: int
    layout: Layout


class ReleaseWeights(msgspec.Struct, frozen=True, array_like=True, tag=5):
    call: int


class FetchSlabs(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A reader asks for the descriptors of its generation; answered by `Slabs` frames until `more` is false."""

    call: int


class AcquirePool(msgspec.Struct, frozen=True, array_like=True, tag=7):
    call: int
    epoch: int
    geometry: str
    timeout_ms: int


class AddPoolSlabs(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The owner of a fresh pool hands over its pages; with `last` the pool is complete. The first descriptor of all
    is the index's."""

    call: int
    sizes: list[int]
    last: bool


class FetchPool(msgspec.Struct, frozen=True, array_like=True, tag=9):
    call: int


class Mapping(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """This process maps the device's pages, as part of the engine of `epoch` (None: a standby)."""

    call: int
    epoch: int | None


class Quiesced(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A planned handover: device drained, write access dropped."""

    call: int
    epoch: int


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A wait the client has given up."""

    call: int
    waiting: int


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag=13):
    call: int


class Donate(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Vault and keeper both died: a mapped engine gives the weights' record and descriptors back."""

    call: int
    layout: Layout
    last: bool


class DonatePool(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Vault and keeper both died: the pool's owner gives index and pages back, in order, and goes on owning it."""

    call: int
    epoch: int
    geometry: str
    sizes: list[int]
    last: bool
    made_epoch: int = 0  # under which its pages were made


class SumSlab(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """A reader asks for the checksum of one slab of its generation."""

    call: int
    slab: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """The connection's end that follows is meant: this process touches nothing of the vault's any more."""


FromClient = (
    Hello | AskWeights | AddSlabs | CommitWeights | ReleaseWeights | FetchSlabs | AcquirePool | AddPoolSlabs
    | FetchPool | Mapping | Quiesced | CancelCall | GetStatus | Donate | DonatePool | SumSlab
    | Leave
)  # fmt: skip

# -- vault to client


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """`resumed`: what the client had mapped is still what the vault keeps."""

    version: int
    device: str
    vault: str  # this vault process's own id
    resumed: bool
    pool_epoch: int = 0  # the last one granted, as far as this vault knows


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=102):
    """A call refused; with call 0 the connection itself, which closes after it."""

    call: int
    code: str
    reason: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag=103):
    call: int


class WeightsGranted(msgspec.Struct, frozen=True, array_like=True, tag=104):
    """`mode` is "rw" or "ro"; for "ro" the layout comes along."""

    call: int
    mode: str
    generation: int
    layout: Layout | None = None


class WeightsEmpty(msgspec.Struct, frozen=True, array_like=True, tag=105):
    call: int


class Slabs(msgspec.Struct, frozen=True, array_like=True, tag=106):
    """Some of the slabs asked for, in order, one descriptor each; a pool's with the epoch it was made under."""

    call: int
    sizes: list[int]
    more: bool
    made_epoch: int = 0


class PoolGranted(msgspec.Struct, frozen=True, array_like=True, tag=107):
    """`adopt`: pages and index of the last owner are there, made under `made_epoch` (0: they are to be made)."""

    call: int
    epoch: int
    adopt: bool
    made_epoch: int


class Status(msgspec.Struct, frozen=True, array_like=True, tag=108):
    call: int
    facts: bytes  # JSON


class SlabSum(msgspec.Struct, frozen=True, array_like=True, tag=109):
    call: int
    digest: str  # blake2b, 128 bits, in hex


class Superseded(msgspec.Struct, frozen=True, array_like=True, tag=120):
    """Notice to readers: newer weights are committed beside yours."""

    by_hash: str


class Fence(msgspec.Struct, frozen=True, array_like=True, tag=121):
    """Notice to a pool's owner: `kind` is "cpu" or "gpu"."""

    kind: str
    epoch: int


class LetGo(msgspec.Struct, frozen=True, array_like=True, tag=125):
    """Notice to readers: somebody waits to load weights anew in the place of yours, which stay while you hold them."""


# The kinds of `PoolNews`.
OWNER_GONE = "owner_gone"  # the owner of `epoch` has ended or stepped back
MADE = "made"  # the pool is complete and can be fetched; made under `epoch`
GRANTED = "granted"  # `epoch` owns it
DROPPED = "dropped"  # there is none any more


class Deposed(msgspec.Struct, frozen=True, array_like=True, tag=122):
    """Notice to one who came back as the pool's owner under `epoch`: it is not, and must write nothing more."""

    epoch: int
    reason: str


class PoolNews(msgspec.Struct, frozen=True, array_like=True, tag=123):
    """Notice to everyone with a mapper's seat, also upon taking it. A hint, ahead of the keeper: ask before acting."""

    kind: str
    epoch: int


FromVault = (
    Welcome | Failed | Done | WeightsGranted | WeightsEmpty | Slabs | PoolGranted | Status | SlabSum
    | Superseded | Fence | PoolNews | Deposed | LetGo
)  # fmt: skip

# -- vault and keeper


class Put(msgspec.Struct, frozen=True, array_like=True, tag=201):
    """Keep a record with its descriptors. In parts while `more`; it counts, whole, with the last part."""

    call: int
    key: str
    blob: bytes
    more: bool


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=202):
    call: int
    key: str


class ListAll(msgspec.Struct, frozen=True, array_like=True, tag=203):
    call: int


class Kept(msgspec.Struct, frozen=True, array_like=True, tag=204):
    """The keeper's answer to Put, Drop, and the end of a list."""

    call: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=205):
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
