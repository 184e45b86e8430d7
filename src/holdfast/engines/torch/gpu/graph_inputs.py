"""What graphs read: block tables and sampling settings, kept on the device and sent only as they change.

Always true: a row's table holds its segment's blocks as far as the step needs them; rows of nobody point at `filler`, a
block that nobody reads. What is kept is compared by the block list itself, never by whose it is: a stream that gave its
blocks up comes back, often to the same row, with others (facts 42). A graph draws every row by temperature and seed
alone; of rows that want more than that (sampling.is_plain) the token is drawn again after it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from holdfast.engines.paged.sequences import Segment, Stream
from holdfast.engines.sampling.noise import seed_key
from holdfast.engines.sampling.settings import is_greedy
from holdfast.engines.torch.model.batch import on_device
from holdfast.engines.torch.sampling import SamplingRows, is_plain

Settings = tuple[int, int, int]  # seed, temperature's bits, greedy or not


class GraphInputs:
    """For up to `rows` streams a step, each with at most `table_width` blocks."""

    def __init__(self, rows: int, table_width: int, filler: int, words: torch.Tensor) -> None:
        self.filler = filler
        self.words = words
        self.tables = torch.full((rows, table_width), filler, dtype=torch.int64, device=words.device)
        # What each row of `tables` holds: the block list, the very one, and how much of it was sent. None: the filler.
        self._held: list[tuple[list[int] | None, int]] = [(None, 1)] * rows
        self._settings: dict[Stream, tuple[Settings, bool]] = {}  # of the last step's streams; and whether plain

    @property
    def rows(self) -> int:
        return self.tables.shape[0]

    def fill_tables(self, segments: Sequence[Segment], size: int) -> None:
        """Bring the first `size` rows up to date: the segments', in their order, then nobody's."""
        places: list[int] = []
        blocks: list[int] = []
        width = self.tables.shape[1]
        for row in range(size):
            held, sent = self._held[row]
            if row >= len(segments):
                if held is not None:
                    places.append(row * width)
                    blocks.append(self.filler)
                    self._held[row] = (None, 1)
                continue
            now = segments[row].blocks
            known = sent if now is held else 0
            new = now[known:]
            if new:
                places += range(row * width + known, row * width + known + len(new))
                blocks += new
                self._held[row] = (now, known + len(new))
        if places:
            target, values = on_device([places, blocks], self.tables.device)
            self.tables.view(-1).index_copy_(0, target, values)

    def settings(self, segments: Sequence[Segment]) -> tuple[list[Settings], list[int]]:
        """By row, of the segments that draw; and which rows want more."""
        known = self._settings
        now = self._settings = {each.owner: known.get(each.owner) or self._settings_of(each.owner) for each in segments}
        return [given for given, _ in now.values()], [row for row, (_, plain) in enumerate(now.values()) if not plain]

    def _settings_of(self, stream: Stream) -> tuple[Settings, bool]:
        sampling = stream.request.sampling
        greedy = is_greedy(sampling)
        (bits,) = struct.unpack("q", struct.pack("d", 1.0 if greedy else sampling.temperature))
        return (seed_key(sampling.seed), bits, int(greedy)), is_plain(sampling, self.words.shape[0])

    def sampling_rows(self, positions: torch.Tensor, settings: torch.Tensor) -> SamplingRows:
        """`settings` [3, rows], as lists of `settings` were sent; `positions` of the tokens to draw."""
        seeds, temperatures, greedy = settings.unbind()
        return SamplingRows(
            [],
            seeds=seeds,
            positions=positions,
            temperatures=temperatures.view(torch.float64).float().unsqueeze(1),
            words=self.words,
            likeliest=greedy.bool().unsqueeze(1),
        )
