"""The scheduler's part of images: which step encodes an image, and where its embeddings lie.

An image is encoded when a step could compute one of its positions. So an image that the prefix
cache has costs nothing. `prompt_end` books the rows of the image's embeddings and puts the image
into a queue. It ends the step's part of the prompt before the image, unless the step encodes the
image. `plan` tells the ranks which layers of the queue's images to compute: all of them, or a few
parts in a step in which streams decode.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import RequestError
from quire.executor import Capacity, Executor
from quire.features.call import RequestField
from quire.features.images.args import ImageArgs
from quire.features.images.embedding_rows import EmbeddingRows, ImageRows
from quire.features.images.encoder_steps import (
    COLUMN,
    ENCODE,
    PART,
    TABLE,
    EncodeEntry,
    Span,
    TableFacts,
    layer_ranges,
    patch_bucket,
)
from quire.features.images.fields import ITEMS, PlacedImage
from quire.features.images.processor import ImageGrid
from quire.features.images.shared_pixels import open_pixels
from quire.features.images.stats import ImageStats
from quire.features.loop_feature import LoopFeature
from quire.plan import RowFlag
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder

_NO_LIMIT = 2**31
_SHARED_FROM = 5
"""Positions from which an image's ids have as many bits as a hash needs. The KV of smaller images
is not shared."""


@dataclass(slots=True)
class _Image:
    """An image of a request.

    Attributes:
        item: as the request carries it.
        fd: this process's descriptor of its pixels.
    """

    item: PlacedImage
    fd: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.item.start + self.item.tokens


@dataclass(slots=True)
class _Images:
    """The images of a request, which all its completions share.

    Attributes:
        images: in the order of their positions.
        open: ids of its unfinished completions.
    """

    images: list[_Image] = field(default_factory=list)
    open: set[str] = field(default_factory=set)

    def between(self, start: int, end: int) -> Iterator[_Image]:
        """Yields the images with a position from `start` to before `end`."""
        for image in self.images:
            if image.end > start and image.item.start < end:
                yield image


@dataclass(slots=True, eq=False)
class _Encoding:
    """An image in the encoder's queue.

    Attributes:
        rows: where its embeddings go.
        item: as a request carries it.
        fd: a descriptor of its pixels, which is not the request's.
        parts: the parts that are left, each the first layer and the layer after the last.
        weight: the work of a part, in parts of `PART` patches.
    """

    rows: ImageRows
    item: PlacedImage
    fd: int
    parts: list[tuple[int, int]]
    weight: int

    def share(self, room: int) -> int:
        """Returns how many parts a step computes that has room for parts of `PART` patches."""
        return min(len(self.parts), max(1, room // self.weight)) if room > 0 else 0


class ImageFeature(Feature, LoopFeature):
    """Knows the images of all requests. Belongs to the engine's thread, like the scheduler."""

    def __init__(self, config: EngineConfig) -> None:
        settings = ImageArgs.of(config.args)
        self._most = settings.max_images
        self._whole = not config.scheduler.enable_chunked_prefill
        # Without chunked prefill a prompt is computed whole, however many images it has.
        self._budget = _NO_LIMIT if self._whole else settings.image_step_tokens
        self._requests: dict[str, _Images] = {}
        """By the name that a request's completions share."""
        self._spans: list[list[Span]] = [[] for _ in range(config.scheduler.max_num_seqs)]
        """By lane, its images as the device knows them."""
        self._queue: deque[_Encoding] = deque()
        """The images to encode. One after the other, because the encoder has room for one."""
        self._room: int | None = None
        """Most parts that the next step encodes; None until something must know."""
        self._live: dict[str, Request] = {}
        """All requests that have not ended, with and without images."""
        self._planned = self._collected = 0
        self._closing: deque[tuple[int, int]] = deque()
        """Descriptors to close, each with the number of steps that may read it."""
        self._stats = ImageStats()
        self._rows: EmbeddingRows
        self._table: TableFacts

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._table = executor.call(TABLE, None)
        self._rows = EmbeddingRows(self._table.rows)
        return self

    # -- a request -----------------------------------------------------------------------------

    def fields(self) -> Mapping[RequestField[Any], Callable[[str, Any], None]]:
        return {ITEMS: self._take}

    def _take(self, name: str, items: list[PlacedImage]) -> None:
        """Opens the pixels of a request that was queued."""
        self._check(items)
        images = self._requests[name].images
        for item in items:
            images.append(_Image(item, open_pixels(item.memory, item.size)))
            self._stats.pixel_bytes += 3 * item.size[0] * item.size[1]
        self._stats.images += len(items)

    def _check(self, items: list[PlacedImage]) -> None:
        """Raises RequestError if the images could never be computed."""
        if len(items) > self._most:
            raise RequestError(
                f"the request has {len(items)} images; at most {self._most} are allowed "
                "(--max-images)"
            )
        counts = [item.tokens for item in items]
        needed = sum(counts) if self._whole else max(counts, default=0)
        if needed > self._rows.size:
            raise RequestError(
                f"images of {needed} positions must be in memory at once, but there is room for "
                f"{self._rows.size} (--image-cache-gb)"
            )

    def admit(self, request: Request) -> RequestError | None:
        self._live[request.request_id] = request
        if request.prompt is not None:
            name = request.request_id.rpartition("/")[0]
            self._requests.setdefault(name, _Images()).open.add(request.request_id)
        return None

    def _images(self, request: Request) -> _Images | None:
        if request.prompt is None:
            return None
        return self._requests.get(request.request_id.rpartition("/")[0])

    def reusable(self, request: Request, n: int) -> int:
        """Ends a match before an image that it has only in part.

        One id has 31 bits. Only all ids of an image together tell it from others.
        """
        found = self._images(request)
        for image in () if found is None else found.images:
            start, count = image.item.start, image.item.tokens
            if start < n and (n < image.end or count < _SHARED_FROM):
                return start
        return n

    def release(self, request: Request) -> bool:
        found = self._images(request)
        for image in () if found is None else found.images:
            rows = self._rows.find(_key(image.item, request))
            if rows is not None:
                self._leave(rows, request)
        return False

    def finish(self, request: Request) -> None:
        self._live.pop(request.request_id, None)
        found = self._images(request)
        if found is None:
            return
        self.release(request)
        found.open.discard(request.request_id)
        if not found.open:
            del self._requests[request.request_id.rpartition("/")[0]]
            self._closing += [(self._planned, image.fd) for image in found.images]
            for image in found.images:
                self._stats.pixel_bytes -= 3 * image.item.size[0] * image.item.size[1]
            self._close_read()

    def _leave(self, rows: ImageRows, request: Request) -> None:
        rows.users.pop(request.request_id, None)
        if not rows.users and not rows.encoded:
            self._rows.drop(rows)

    # -- a step --------------------------------------------------------------------------------

    def prompt_end(self, request: Request, start: int, end: int) -> int:
        found = self._images(request)
        for image in () if found is None else found.between(start, end):
            if not self._book(image.item, image.fd, request):
                return max(start, image.item.start)
        return end

    def _book(self, item: PlacedImage, fd: int, request: Request) -> bool:
        """Books rows for an image. Returns whether the next step may read them."""
        rows = self._rows.find(_key(item, request))
        if rows is None:
            queued = sum(each.item.tokens for each in self._queue)
            if queued and queued + item.tokens > self._budget:
                return False
            rows = self._rows.book(_key(item, request), item.tokens, request)
            if rows is None:
                return False
            self._enqueue(rows, item, fd)
        elif rows.encoded and request.request_id not in rows.users:
            self._stats.cache_hits += 1
        rows.users[request.request_id] = request
        return rows.encoded or self._in_next_step(rows)

    def _enqueue(self, rows: ImageRows, item: PlacedImage, fd: int) -> None:
        _, h, w, _ = item.grid
        bucket = patch_bucket(h * w)
        parts = layer_ranges(self._table.layers, bucket)
        # The request may end before the image is encoded for another request.
        self._queue.append(_Encoding(rows, item, os.dup(fd), parts, max(1, bucket // PART)))

    def _in_next_step(self, rows: ImageRows) -> bool:
        """Whether the next step encodes what is left of an image in the queue."""
        self._drop_stale()
        room = self._next_room()
        for each in self._queue:
            count = each.share(room)
            if each.rows is rows or count < len(each.parts):
                return each.rows is rows and count == len(each.parts)
            room -= count * each.weight
        return False

    def _next_room(self) -> int:
        """Returns the most parts that the next step encodes: few if streams decode."""
        if self._room is None:
            streams = not self._whole and any(each.generating for each in self._live.values())
            self._room = self._table.parts_a_step if streams else _NO_LIMIT
        return self._room

    def _drop_stale(self) -> None:
        """Takes images from the queue whose rows nobody waits for."""
        for each in [each for each in self._queue if each.rows.dropped]:
            self._queue.remove(each)
            self._closing.append((self._planned, each.fd))

    def pending(self, idle: bool) -> bool:
        self._drop_stale()
        return bool(self._queue)

    def plan(self, builder: PlanBuilder) -> None:
        self._planned += 1
        changed: set[int] = set()
        for admit in builder.admits:
            if self._spans[admit.lane]:
                self._spans[admit.lane] = []
                changed.add(admit.lane)
        self._plan_encoding(builder)
        if self._requests:
            self._plan_images(builder, changed)
        if changed:
            lanes = int32(sorted(changed))
            builder.write(COLUMN, lanes, np.stack([self._words(lane) for lane in lanes.tolist()]))

    def _plan_encoding(self, builder: PlanBuilder) -> None:
        """Plans the encoder's work in the step."""
        self._drop_stale()
        room = self._next_room() if self._queue else 0
        self._room = None
        entries: list[EncodeEntry] = []
        while self._queue and room > 0:
            encoding = self._queue[0]
            count = encoding.share(room)
            room -= count * encoding.weight
            entries.append(self._entry(encoding, count))
            if encoding.parts:
                # The room that is left is less than a part of this image.
                break
            self._queue.popleft()
            encoding.rows.encoded = True
            self._closing.append((self._planned, encoding.fd))
        if entries:
            firsts = int32([entry.row for entry in entries])
            builder.write(ENCODE, firsts, int32([entry[1:] for entry in entries]))

    def _entry(self, encoding: _Encoding, count: int) -> EncodeEntry:
        """Takes parts from an image, and returns the entry for them."""
        parts, item = encoding.parts[:count], encoding.item
        del encoding.parts[:count]
        if not encoding.parts:
            self._stats.encoded += 1
            self._stats.encoded_tokens += item.tokens
        return EncodeEntry(
            encoding.rows.first,
            os.getpid(),
            encoding.fd,
            *item.size,
            *item.grid,
            item.tokens,
            parts[0][0],
            parts[-1][1],
        )

    def _plan_images(self, builder: PlanBuilder, changed: set[int]) -> None:
        """Plans the images of the step's prompt rows.

        Args:
            changed: gets the lanes whose spans the device must learn.
        """
        admitted = {admit.lane for admit in builder.admits}
        for row in np.flatnonzero(builder.flags & int(RowFlag.PROMPT)).tolist():
            request, lane = builder.requests[row], int(builder.lanes[row])
            found = self._images(request)
            if found is None or not found.images:
                continue
            end = request.planned
            start, before = end - int(builder.q_len[row]), list(self._spans[lane])
            if lane in admitted:
                self._enter(request, found, lane, start)
            for place, image in enumerate(found.images):
                if image.end > start and image.item.start < end:
                    rows = self._use(image, place, request, lane)
                    if image.end <= end:
                        self._leave(rows, request)
            if self._spans[lane] != before:
                changed.add(lane)

    def _enter(self, request: Request, found: _Images, lane: int, start: int) -> None:
        """Notes the images of a request that takes a lane, and computes from `start` on."""
        self._spans[lane] = [_span(image.item, -1) for image in found.images]
        for image in found.images:
            # An earlier attempt to start the request may have booked rows for a cached image.
            rows = self._rows.find(_key(image.item, request)) if image.end <= start else None
            if rows is not None:
                self._leave(rows, request)

    def _use(self, image: _Image, place: int, request: Request, lane: int) -> ImageRows:
        """Returns the rows of an image that the step computes, which `prompt_end` has booked."""
        rows = self._rows.find(_key(image.item, request))
        if rows is None or not rows.encoded:
            raise RuntimeError("a step computes an image that nothing has encoded")
        self._spans[lane][place] = _span(image.item, rows.first)
        rows.users[request.request_id] = request
        return rows

    def _words(self, lane: int) -> Int32:
        """Returns a lane's line of the column, int32 [images, 4]."""
        words = np.zeros((self._most, len(Span._fields)), dtype=np.int32)
        spans = self._spans[lane]
        if spans:
            words[: len(spans)] = spans
        return words

    # -- results -------------------------------------------------------------------------------

    def after_update(self, step_id: int) -> None:
        self._collected += 1
        self._close_read()

    def _close_read(self) -> None:
        """Closes descriptors that no step in flight reads."""
        while self._closing and self._closing[0][0] <= self._collected:
            os.close(self._closing.popleft()[1])

    def stats(self) -> dict[str, Any]:
        self._stats.encoder_seconds = self._table.seconds()
        self._stats.cached_tokens = self._rows.used
        self._stats.cached_bytes = self._rows.used * self._table.row_bytes
        return {"images": self._stats}

    def forget(self) -> None:
        """Forgets the embeddings that no request uses, with the prefixes."""
        self._rows.clear()

    def close(self, drain: Any) -> None:
        for images in self._requests.values():
            self._closing += [(0, image.fd) for image in images.images]
        self._requests.clear()
        self._closing += [(0, each.fd) for each in self._queue]
        self._queue.clear()
        for _, fd in self._closing:
            os.close(fd)
        self._closing.clear()


def _key(item: PlacedImage, request: Request) -> bytes:
    """Returns the key of an image's embeddings. Tenants with different salts share none, or the
    time to the first token would tell one which images another has."""
    return item.digest + request.cache_salt.encode()


def _span(item: PlacedImage, row: int) -> Span:
    frames, h, w, merge = item.grid
    return Span(item.start, item.tokens, ImageGrid(frames, h, w, item.tokens, merge).columns, row)
