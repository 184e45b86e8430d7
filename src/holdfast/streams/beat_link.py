"""A worker's beats as whoever judges it hears them: a connection of their own, to a thread that does nothing else."""

from __future__ import annotations

from holdfast.streams.framed import Framed
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import Beat, decode_to_frontend


class BeatConnection(Framed):
    """Beats in."""

    purpose = "beat"

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.beats: list[Beat] = []  # since the last tick; ten a second at most, taken ten times a second

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                message = decode_to_frontend(payload)
                if isinstance(message, Beat):
                    self.beats.append(message)
                    del self.beats[:-64]
                else:
                    self._first(message)
        except FrameError as error:
            self._break(f"worker sent what is not our protocol: {error}")
