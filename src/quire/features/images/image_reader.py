"""Reads the images of requests, in the process where they arrive.

Threads decode images, so the event loop goes on. There are few of them, and requests wait while
others have much memory for pixels. So a flood of images waits here, and text passes it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.errors import RequestError
from quire.features.call import PromptInputs, PromptPart, PromptReader
from quire.features.images.args import ImageArgs
from quire.features.images.download import fetch
from quire.features.images.image_sources import (
    decode_base64,
    decode_data_uri,
    is_address,
    is_data_uri,
    refused,
    too_large,
)
from quire.features.images.model_settings import refusal
from quire.features.images.placement import LoadedImage, place_images
from quire.features.images.processor import (
    DecodedImage,
    Detail,
    ImageError,
    ImageLimits,
    ImageProcessor,
)
from quire.features.images.shared_pixels import SharedPixels
from quire.system import read_bounded

_THREADS = min(8, os.cpu_count() or 1)
_DOWNLOADS = 32
_MOST_PIXEL_BYTES = 1 << 30
"""Bytes of pixels in shared memory above which further requests wait."""


class ImageReader(PromptReader):
    """Reads, decodes and places images.

    Attributes:
        processor: the checkpoint's processor; None if the model does not see images.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._settings = settings = ImageArgs.of(config.args)
        self._limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
        self.processor: ImageProcessor | None = None
        if config.images:
            path = Path(config.model_path)
            # `load_config` would import torch, which API processes do without.
            stored = json.loads(read_bounded(path / "config.json"))
            self.processor = ImageProcessor.from_folder(path, stored)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        # Threads of their own, so that slow hosts keep no decoding waiting.
        self._downloads = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="downloads")
        self._room = PixelRoom(_MOST_PIXEL_BYTES)

    # -- reading -------------------------------------------------------------------------------

    async def load(self, parts: Sequence[PromptPart]) -> Sequence[LoadedImage]:
        self._check(parts)
        # A request waits as a whole. If it waited for each image, it could wait for itself.
        await self._room.wait()
        tasks = [asyncio.ensure_future(self._load(part)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_close)
            raise

    async def _load(self, part: PromptPart) -> LoadedImage:
        loop, source, kind = asyncio.get_running_loop(), part.source, None
        if isinstance(source, str) and is_address(source):
            source, kind = await loop.run_in_executor(self._downloads, self._fetch, part)
        return await loop.run_in_executor(
            self._threads, self._decode, replace(part, source=source), kind, self._room
        )

    def read(self, parts: Sequence[PromptPart]) -> Sequence[LoadedImage]:
        self._check(parts)
        return list(self._threads.map(self._read, parts))

    def _read(self, part: PromptPart) -> LoadedImage:
        source, kind = part.source, None
        if isinstance(source, str) and is_address(source):
            source, kind = self._fetch(part)
        return self._decode(replace(part, source=source), kind)

    def _check(self, parts: Sequence[PromptPart]) -> None:
        why = refusal(self._config)
        for part in parts:
            if part.kind != "image":
                raise refused(
                    part.param,
                    f"parts of kind {part.kind!r} are not supported, only images are.",
                    "unsupported_parameter",
                )
            if why is not None:
                raise refused(
                    part.param, f"images are not supported: {why}.", "unsupported_parameter"
                )
        most = self._settings.max_images
        if len(parts) > most:
            raise refused(
                parts[most].param,
                f"the request has {len(parts)} images; at most {most} are allowed (--max-images).",
                "too_many_images",
            )

    def _decode(
        self, part: PromptPart, kind: str | None = None, room: PixelRoom | None = None
    ) -> LoadedImage:
        """Decodes one image into shared memory.

        Args:
            kind: the media type that a host has declared.
            room: counts the memory.
        """
        processor = self.processor
        if processor is None:
            raise RuntimeError("a model without images reads none")
        try:
            image = self._decoded(processor, part, kind)
            grid = processor.size(image.width, image.height, cast("Detail", part.detail))
        except ImageError as error:
            raise refused(part.param, str(error), error.code or "invalid_image") from None
        digest = processor.digest(image, grid)
        pixels = SharedPixels(image.pixels, None if room is None else room.give_back)
        if room is not None:
            room.take(image.pixels.nbytes)
        return LoadedImage(pixels, grid, digest, part.param)

    def _decoded(
        self, processor: ImageProcessor, part: PromptPart, kind: str | None
    ) -> DecodedImage:
        source, most = part.source, self._settings.max_image_bytes
        if isinstance(source, str) and is_data_uri(source):
            source, kind = decode_data_uri(source, most, part.param)
        elif isinstance(source, str):
            source = decode_base64(source, most, part.param)
        if isinstance(source, Path):
            source = self._file(source, part.param)
        if isinstance(source, bytes):
            return processor.open(source, self._limits, kind)
        return processor.convert(source, self._limits)

    def _file(self, path: Path, param: str) -> bytes:
        try:
            size = path.stat().st_size
            if size <= self._settings.max_image_bytes:
                return path.read_bytes()
        except OSError as error:
            raise refused(param, f"the file cannot be read: {error.strerror}.") from None
        raise too_large(size, self._settings.max_image_bytes, param)

    def _fetch(self, part: PromptPart) -> tuple[bytes, str | None]:
        settings = self._settings
        return fetch(
            part.source,
            settings.allow_image_hosts,
            most=settings.max_image_bytes,
            seconds=settings.image_fetch_seconds,
            param=part.param,
        )

    # -- places --------------------------------------------------------------------------------

    def place(self, ids: Int32, parts: Sequence[Any]) -> tuple[Int32, PromptInputs]:
        if self.processor is None:
            raise RuntimeError("a model without images places none")
        token_id, vocab_size = self.processor.token_id, self._config.vocab_size
        placed = place_images(ids, parts, token_id, vocab_size)
        if placed is None:
            found, wanted = int((ids == token_id).sum()), len(parts)
            raise RequestError(
                f"the prompt has places for {found} images, but the request has {wanted}: each "
                f"image needs one token {token_id}, which the model's chat template writes",
                parts[0].param,
                "invalid_image_places",
            )
        if ids[-1] == token_id:
            raise refused(parts[-1].param, "a prompt must not end with an image.")
        return placed


def _close(task: asyncio.Task[LoadedImage]) -> None:
    """Frees the image of a task that has ended."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


class PixelRoom:
    """Bounds the bytes of pixels in shared memory. Any thread may call `take` and `give_back`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._changes: deque[int] = deque()
        """Changes of `_used` that `wait` has not counted. A deque's methods are atomic, and
        finalizers call `give_back` at any moment."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._given_back = asyncio.Event()

    async def wait(self) -> None:
        """Waits until less than the bound is used."""
        self._loop = asyncio.get_running_loop()
        while self._count() >= self._most:
            self._given_back.clear()
            await self._given_back.wait()

    def _count(self) -> int:
        while self._changes:
            self._used += self._changes.popleft()
        return self._used

    def take(self, size: int) -> None:
        self._changes.append(size)

    def give_back(self, size: int) -> None:
        self._changes.append(-size)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._given_back.set)
