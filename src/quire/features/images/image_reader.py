"""Reads the images of requests, in the process where they arrive.

Threads decode images, so the event loop goes on. There are few of them, and the pixels of all
requests are bounded: a flood of images waits here, and text passes it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
_MOST_PIXEL_BYTES = 1 << 30
"""Bytes of pixels in shared memory above which further images wait."""


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
        self._slots: asyncio.Semaphore | None = None
        self._room = PixelRoom(_MOST_PIXEL_BYTES)

    # -- reading -------------------------------------------------------------------------------

    async def load(self, parts: Sequence[PromptPart]) -> Sequence[LoadedImage]:
        self._check(parts)
        if self._slots is None:  # Made here because it belongs to the running loop.
            self._slots = asyncio.Semaphore(_THREADS)
        tasks = [asyncio.ensure_future(self._load(part, self._slots)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _load(self, part: PromptPart, slots: asyncio.Semaphore) -> LoadedImage:
        async with slots:
            await self._room.wait()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._read, part)

    def read(self, parts: Sequence[PromptPart]) -> Sequence[LoadedImage]:
        self._check(parts)
        return list(self._threads.map(self._read, parts))

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

    def _read(self, part: PromptPart) -> LoadedImage:
        """Reads and decodes one image."""
        processor = self.processor
        if processor is None:
            raise RuntimeError("a model without images reads none")
        try:
            image = self._decoded(processor, part)
            grid = processor.size(image.width, image.height, cast("Detail", part.detail))
        except ImageError as error:
            raise refused(part.param, str(error), error.code or "invalid_image") from None
        digest = processor.digest(image, grid)
        self._room.take(image.pixels.nbytes)
        return LoadedImage(
            SharedPixels(image.pixels, self._room.give_back), grid, digest, part.param
        )

    def _decoded(self, processor: ImageProcessor, part: PromptPart) -> DecodedImage:
        source, kind = part.source, None
        if isinstance(source, str):
            source, kind = self._bytes_of(source, part.param)
        if isinstance(source, Path):
            size = source.stat().st_size
            if size > self._settings.max_image_bytes:
                raise too_large(size, self._settings.max_image_bytes, part.param)
            source = source.read_bytes()
        if isinstance(source, bytes):
            return processor.open(source, self._limits, kind)
        return processor.convert(source, self._limits)

    def _bytes_of(self, text: str, param: str) -> tuple[bytes, str | None]:
        settings = self._settings
        if is_data_uri(text):
            return decode_data_uri(text, settings.max_image_bytes, param)
        if "://" not in text[:16]:
            return decode_base64(text, settings.max_image_bytes, param), None
        return fetch(
            text,
            settings.allow_image_hosts,
            most=settings.max_image_bytes,
            seconds=settings.image_fetch_seconds,
            param=param,
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


class PixelRoom:
    """Bounds the bytes of pixels in shared memory. All methods may be called from any thread,
    except `wait`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Waits until less than the bound is used."""
        self._loop = asyncio.get_running_loop()
        while self._used >= self._most:
            self._changed.clear()
            await self._changed.wait()

    def take(self, size: int) -> None:
        self._used += size

    def give_back(self, size: int) -> None:
        self._used -= size
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)
