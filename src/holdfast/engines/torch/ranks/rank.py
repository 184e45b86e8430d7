"""One rank of a torch engine beside its leader: `python -m holdfast.engines.torch.ranks.rank '{"tether": …}'`.

It has a vault, a device, a share of the weights and of every KV block of its own; it decides nothing. Orders (load,
hold, wake, rest) come to the event loop; steps to a thread, as words on a socket of their own. Always true: private
blocks are computed on only between `hold` and `go_on`, pool blocks only between `wake` and `rest`; any failure ends
the process, and with it the engine.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path

import msgspec
import torch

from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.seat import Orders, Seat, SeatInhabitant, Tether, end, ends_when_emptied, orders_of, tied
from holdfast.engines.torch.canary import private_blocks
from holdfast.engines.torch.computer import Computer
from holdfast.engines.torch.model.decoder import forward
from holdfast.engines.torch.model.weights import TorchWeights
from holdfast.engines.torch.ranks.group import Group, GroupPeers
from holdfast.engines.torch.ranks.share import RankWork, read
from holdfast.engines.torch.ranks.words import ANSWER, Compute, Piece, done_again, heard
from holdfast.engines.torch.stepper import threads_for, use_threads
from holdfast.memory.torch.tensors import torch_device


class RankLaunch(msgspec.Struct, frozen=True):
    tether: Tether
    steps: int  # the descriptor of its end of the steps' socket pair
    work: int  # of a file with its RankWork, written by the leader


class Rank(Seat):
    """A seat with a vault of its own; besides a seat's orders it has those by which the group is made."""

    def __init__(self, work: RankWork, orders: Orders, steps: socket.socket) -> None:
        self._work, self._steps = work, steps
        self._geometry, place = work.geometry, work.place
        self._device = torch_device(place.device)
        share = {"rank": self._geometry.rank, "ranks": self._geometry.rank_count}
        self._weights = TorchWeights(work.checkpoint, work.dtype, self._device, lambda *_: None, **share)
        # Devices are written side by side: a rank waits for the writers of its own device only.
        lock_dir = Path(place.vault_socket).parent / f"rank-{self._geometry.rank}"
        lock_dir.mkdir(exist_ok=True)
        private_bytes = self._geometry.block_bytes * private_blocks(work.settings.block_tokens)
        self.memory = VaultMemory(place, private_bytes, SeatInhabitant(orders), lock_dir)
        ends_when_emptied(self.memory)
        self._group: Group | None = None
        self._awake: Computer | None = None
        self._tried: tuple[Computer, int] | None = None  # for a canary; and the first private block

    async def hello(self) -> None:
        """Everything is imported."""

    async def join(self, folder: str) -> None:
        self._group = await asyncio.to_thread(Group.join, Path(folder), self._work, self._device)
        self.memory.peers = GroupPeers(self._group)
        # A daemon: a sum that waits for a dead peer must not keep the process from ending.
        threading.Thread(target=self._make_steps, name="steps", daemon=True).start()

    async def load(self) -> None:
        await self.memory.load(self._weights)
        await self.memory.stand_by(self._geometry)

    async def sleep(self) -> None:
        await self.memory.sleep()

    async def hold(self) -> None:
        await self.memory.settled.wait()
        await self.memory.still.acquire()
        mapping = self.memory.pool.mapping
        assert mapping is not None, "private memory is mapped from the first load on"
        first = -(-(mapping.private_address - mapping.pages_address) // self._geometry.block_bytes)
        self._tried = self._computer(mapping.pages_address, mapping.range_size), first

    async def go_on(self) -> None:
        self._tried = None
        self.memory.still.release()

    async def wake(self, epoch: int) -> None:
        owned = await self.memory.own(epoch)
        self._awake = self._computer(owned.pages_address, owned.range_bytes)

    async def fence(self) -> None:
        await self.memory.gpu_fence.wait()
        if self.memory.owned is not None:
            self.memory.owned.pool.gpu_fence_passed()

    async def rest(self) -> None:
        self._awake = None
        await self.memory.rest()

    async def verify(self) -> str:
        return await self.memory.verify()

    async def renew(self) -> None:
        await self.memory.renew()

    # -- steps

    def _make_steps(self) -> None:
        try:
            use_threads(threads_for(self._work.settings.threads), self._device)
            while self._step():
                pass
        except Exception as error:  # the thread's root: after it no step can be believed
            end(f"a step failed: {type(error).__name__}: {error}")

    def _step(self) -> bool:
        words = heard(self._steps)
        if words is None:
            return False
        if words.acts:
            owned = self.memory.owned
            assert owned is not None, "only an owner's index changes"
            done_again(words.acts, owned.pool.index, owned.pool.epoch)
        if not isinstance(words, Compute):
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            self._steps.sendall(ANSWER)
            return True
        computer, pieces = self._awake, words.pieces
        if words.private:
            assert self._tried is not None, "a canary before its order"
            computer, first = self._tried
            pieces = [Piece(each.tokens, each.start, [at + first for at in each.blocks]) for each in pieces]
        assert computer is not None, "a step before its order"
        forward(computer.model, computer.batch(pieces), computer.kv)
        return True

    def _computer(self, address: int, size: int) -> Computer:
        assert self._group is not None, "join first"
        work, settings = self._work, self._work.settings
        model = work.model(self._weights.tensors, self._group.all_reduce)
        return Computer(model, work.kv(address, size, self._device), settings.block_tokens, settings.rows)


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=RankLaunch)
    if not tied(launch.tether):
        return 1
    with os.fdopen(launch.work, "rb") as file:
        file.seek(0)
        work = read(file.read())
    asyncio.run(live(launch, work))
    return 0


async def live(launch: RankLaunch, work: RankWork) -> None:
    orders = Orders(launch.tether)
    rank = Rank(work, orders, socket.socket(fileno=launch.steps))
    own = rank.hello, rank.join, rank.verify, rank.renew
    await orders.obey(orders_of(rank) | {each.__name__: each for each in own})
    os._exit(0)  # the leader is gone: nothing is left to be put in order, and a thread may hang in a sum


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
