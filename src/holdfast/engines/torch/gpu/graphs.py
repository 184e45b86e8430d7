"""Steps as CUDA graphs: one launch in place of hundreds, from the rows' tokens to their next ones.

Always true:
- A graph reads its inputs at fixed addresses, the KV pages at the addresses it was captured with, and no host memory.
- It is captured in private blocks, before any page is owned, so that a takeover only runs it.
- Rows that pad a batch to a captured size write to a block that is never read.
- Decodes have graphs by the number of streams; steps with chunks, like the first one after a takeover, by the number of
  positions.
- The rows' logits can be read after the graph. Every segment's logits are summed (launched.py), even if it draws
  nothing.
- A step larger than any captured one runs without a graph (computer.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from holdfast.engines.paged.sequences import PENDING, PagedStream, Segment
from holdfast.engines.sampling import seed_key
from holdfast.engines.torch.launched import LatestTokens, row_sums
from holdfast.engines.torch.memory_plan import positions_for, sizes_for
from holdfast.engines.torch.model.batch import Batch, Tiles, decode_batch, on_device
from holdfast.engines.torch.model.decoder import BoundModel, forward, logits
from holdfast.engines.torch.sampling import SamplingRows, draw, is_plain

Settings = tuple[int, int, int]  # seed, temperature's bits, greedy or not


class GraphInputs:
    """What graphs read: block tables and sampling settings, kept on the device and sent only as they change; for up to
    `rows` streams a step, each with at most `table_width` blocks.

    Always true: a row's table holds its segment's blocks as far as the step needs them; unused rows point at `filler`,
    a block that is never read. What is kept is compared by the block list itself, never by its stream: a stream that
    gave its blocks up comes back, often to the same row, with others (facts 42). A graph draws every row by
    temperature and seed alone; of rows that want more than that (sampling.is_plain) the token is drawn again after
    it."""

    def __init__(self, rows: int, table_width: int, filler: int, words: torch.Tensor) -> None:
        self.filler = filler
        self.words = words
        self.tables = torch.full((rows, table_width), filler, dtype=torch.int64, device=words.device)
        # What each row of `tables` holds: the block list, the very one, and how much of it was sent. None: the filler.
        self._held: list[tuple[list[int] | None, int]] = [(None, 1)] * rows
        self._settings: dict[PagedStream, tuple[Settings, bool]] = {}  # of the last step's streams; and whether plain

    @property
    def rows(self) -> int:
        return self.tables.shape[0]

    def fill_tables(self, segments: Sequence[Segment], size: int) -> None:
        """Bring the first `size` rows up to date: the segments', in their order, then unused ones."""
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
        """Return the settings by row, of the segments that draw; and which rows want more."""
        known = self._settings
        now = self._settings = {each.owner: known.get(each.owner) or self._settings_of(each.owner) for each in segments}
        return [given for given, _ in now.values()], [row for row, (_, plain) in enumerate(now.values()) if not plain]

    def _settings_of(self, stream: PagedStream) -> tuple[Settings, bool]:
        sampling = stream.request.sampling
        greedy = sampling.is_greedy
        (bits,) = struct.unpack("q", struct.pack("d", 1.0 if greedy else sampling.temperature))
        return (seed_key(sampling.seed), bits, int(greedy)), is_plain(sampling, self.words.shape[0])

    def sampling_rows(self, positions: torch.Tensor, settings: torch.Tensor) -> SamplingRows:
        """Return the rows for `settings` [3, rows] as they were sent, and `positions` of the tokens to draw."""
        seeds, temperatures, greedy = settings.unbind()
        return SamplingRows(
            [],
            seeds=seeds,
            positions=positions,
            temperatures=temperatures.view(torch.float64).float().unsqueeze(1),
            words=self.words,
            likeliest=greedy.bool().unsqueeze(1),
        )


def _smallest(sizes: list[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


def _capture(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Run once first, which compiles its kernels and finds its memory."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads of this process may use the device meanwhile: only what this one does is forbidden.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph


class StepGraphs:
    """The captured graphs of one computer. Every step stores its draws in `latest`, which has a row for every stream
    that may run."""

    def __init__(
        self,
        model: BoundModel,
        kv: torch.Tensor,
        inputs: GraphInputs,
        latest: LatestTokens,
        *,
        step_tokens_max: int,
        tile: int,
    ) -> None:
        self._model, self._kv, self._inputs, self._latest = model, kv, inputs, latest
        self._block_tokens, self._tile = kv.shape[3], tile
        rows, device = inputs.rows, kv.device
        self._sizes, self._lengths = sizes_for(rows), positions_for(step_tokens_max)
        longest = max(self._lengths, default=1)
        # Decodes: token (or PENDING), the row of `latest` that PENDING means, position, and the settings.
        self._decodes = torch.zeros(6, rows, dtype=torch.int64, device=device)
        # Steps with chunks. By position: token, its row of `latest`, position, block. By tile: as `Tiles`. By stream,
        # those that draw first: which position's state, the position drawn, and the settings.
        self._positions = torch.zeros(4, longest, dtype=torch.int64, device=device)
        self._tiles = torch.zeros(4, self._tiles_of(longest), dtype=torch.int64, device=device)
        self._draws = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(rows, model.head.shape[0], dtype=kv.dtype, device=device)  # of the latest step
        self._decode_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._chunk_graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __repr__(self) -> str:
        return f"<graphs of {self._sizes} decodes and of {self._lengths} positions>"

    @torch.inference_mode()
    def capture(self) -> None:
        self._positions[3].fill_(self._inputs.filler)
        pool = torch.cuda.graph_pool_handle()
        for length in reversed(self._lengths):  # the largest first: the others fit into its memory
            self._chunk_graphs[length] = _capture(lambda length=length: self._chunk_step(length), pool)  # type: ignore[misc]
        for size in reversed(self._sizes):
            self._decode_graphs[size] = _capture(lambda size=size: self._decode_step(size), pool)  # type: ignore[misc]
        for graph in (*self._chunk_graphs.values(), *self._decode_graphs.values()):
            graph.replay()  # the first time it is sent to the device, which takes milliseconds
        torch.cuda.synchronize()

    def run(self, segments: Sequence[Segment], sources: Sequence[int]) -> list[int] | None:
        """Run the step as a graph; return the rows, among those that draw, that need more than the graph drew, or None
        if no graph fits. `sources`: for each segment, the row of `latest` that has its token if it is PENDING."""
        if len(segments) > self._inputs.rows:
            return None
        if all(len(each.tokens) == 1 and each.wants_token for each in segments):
            return self._run_decodes(segments, sources)
        count = sum(len(each.tokens) for each in segments)
        if not self._lengths or count > self._lengths[-1]:
            return None
        return self._run_chunks(segments, sources, _smallest(self._lengths, count))

    # -- decodes

    def _run_decodes(self, segments: Sequence[Segment], sources: Sequence[int]) -> list[int]:
        size = _smallest(self._sizes, len(segments))
        self._inputs.fill_tables(segments, size)
        settings, wanting = self._inputs.settings(segments)
        fill = [0] * (size - len(segments))
        sent = [
            [each.tokens[0] for each in segments] + fill,
            [*sources, *fill],
            [each.start for each in segments] + fill,
            *([*kind, *fill] for kind in zip(*settings, strict=True)),
        ]
        self._decodes[:, :size].copy_(on_device(sent, self._kv.device))
        self._decode_graphs[size].replay()
        return wanting

    def _decode_step(self, size: int) -> None:
        given = self._decodes[:, :size]
        positions = given[2]
        batch = decode_batch(self._known(given[0], given[1]), positions, self._inputs.tables[:size], self._block_tokens)
        self._draw(batch, positions + 1, given[3:])

    # -- steps with chunks

    def _tiles_of(self, length: int) -> int:
        """Return how many tiles a step has at most: every stream's last one may be partly empty."""
        return length // self._tile + self._inputs.rows

    def _run_chunks(self, segments: Sequence[Segment], sources: Sequence[int], length: int) -> list[int]:
        inputs, tile, block_tokens = self._inputs, self._tile, self._block_tokens
        inputs.fill_tables(segments, len(segments))
        by_position: list[tuple[int, int, int, int]] = []
        tiles: list[tuple[int, int, int, int]] = []
        ends: list[tuple[int, int]] = []
        others: list[int] = []
        for number, (segment, source) in enumerate(zip(segments, sources, strict=True)):
            first, start, count = len(by_position), segment.start, len(segment.tokens)
            for at in range(0, count, tile):
                tiles.append((first + at, min(tile, count - at), start + at, number))
            for at, token in enumerate(segment.tokens, start):
                by_position.append((token, source, at, segment.blocks[at // block_tokens]))
            if segment.wants_token:
                ends.append((first + count - 1, segment.position))
            else:
                others.append(first + count - 1)
        tiles.sort(key=lambda place: -place[2])  # those that see the most first: they end last
        by_position += [(0, 0, 0, inputs.filler)] * (length - len(by_position))
        tiles += [(0, 0, 0, 0)] * (self._tiles_of(length) - len(tiles))
        settings, wanting = inputs.settings([each for each in segments if each.wants_token])
        draws = [(*end, *kind) for end, kind in zip(ends, settings, strict=True)]
        draws += [(end, 0, 0, 0, 1) for end in others]
        draws += [(0, 0, 0, 0, 1)] * (inputs.rows - len(draws))
        kinds = ((self._positions, by_position), (self._tiles, tiles), (self._draws, draws))
        # All in one copy to the device: it is the copies that take time, not their length.
        columns = (chain.from_iterable(zip(*rows, strict=True)) for _, rows in kinds)
        flat, at = on_device(list(chain.from_iterable(columns)), self._kv.device), 0
        for target, rows in kinds:
            size = target.shape[0] * len(rows)
            target[:, : len(rows)].copy_(flat[at : at + size].view(target.shape[0], len(rows)))
            at += size
        self._chunk_graphs[length].replay()
        return wanting

    def _chunk_step(self, length: int) -> None:
        tokens, sources, positions, blocks = self._positions[:, :length].unbind()
        # Contiguous, as kernels and captures need it.
        places = self._tiles[:, : self._tiles_of(length)].contiguous()
        batch = Batch(
            tokens=self._known(tokens, sources),
            positions=positions,
            blocks=blocks,
            offsets=positions % self._block_tokens,
            last=self._draws[0],
            tiles=Tiles(places, self._inputs.tables),
        )
        self._draw(batch, self._draws[1], self._draws[2:])

    # -- both

    def _known(self, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens == PENDING, self._latest.tokens.index_select(0, sources), tokens)

    def _draw(self, batch: Batch, positions: torch.Tensor, settings: torch.Tensor) -> None:
        rows = self._inputs.sampling_rows(positions, settings)
        found = logits(self._model, forward(self._model, batch, self._kv))
        self.logits[: found.shape[0]].copy_(found)
        self._latest.store(draw(found, rows).tokens, row_sums(found))
