"""Reads the images and videos of requests, in the process where they arrive.

Threads decode images, so the event loop goes on. There are few of them, and requests wait while
others have much memory for pixels. So a flood of images waits here, and text passes it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.errors import ModelError, RequestError
from quire.features.call import PromptInputs, PromptPart, PromptReader
from quire.features.images.args import ImageArgs
from quire.features.images.download import fetch
from quire.features.images.image_sources import (
    decode_base64,
    decode_data_uri,
    decode_frames,
    is_address,
    is_data_uri,
    refused,
    too_large,
)
from quire.features.images.model_settings import refusal
from quire.features.images.placement import (
    LoadedImage,
    LoadedVideo,
    VideoTokens,
    expand_videos,
    place_images,
)
from quire.features.images.processor import (
    DecodedImage,
    Detail,
    ImageError,
    ImageGrid,
    ImageLimits,
    ImageProcessor,
)
from quire.features.images.shared_pixels import SharedPixels
from quire.features.images.video_frames import FrameReader, VideoFrames, VideoLimits
from quire.features.images.videos import VideoSettings, time_text
from quire.system import read_bounded
from quire.text.tokenizer import Tokenizer

Loaded = LoadedImage | LoadedVideo

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
            self._stored = stored
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        # Threads of their own, so that slow hosts keep no decoding waiting.
        self._downloads = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="downloads")
        self._room = PixelRoom(_MOST_PIXEL_BYTES)
        # Only requests with a turn are read. Without turns, all requests of a burst would find
        # room, because none of them has taken any yet.
        self._turns = asyncio.Semaphore(_THREADS)
        self._download_turns = asyncio.Semaphore(_DOWNLOADS)

    # -- reading -------------------------------------------------------------------------------

    async def load(self, parts: Sequence[PromptPart]) -> Sequence[Loaded]:
        self._check(parts)
        remote = any(_is_remote(part) for part in parts)
        async with self._download_turns if remote else self._turns:
            # A request waits as a whole. If it waited for each image, it could wait for itself.
            await self._room.wait()
            return await self._load_all(parts)

    async def _load_all(self, parts: Sequence[PromptPart]) -> Sequence[Loaded]:
        tasks = [asyncio.ensure_future(self._load(part)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_close)
            raise

    async def _load(self, part: PromptPart) -> Loaded:
        loop, source, kind = asyncio.get_running_loop(), part.source, None
        if _is_remote(part):
            source, kind = await loop.run_in_executor(self._downloads, self._fetch, part)
        return await loop.run_in_executor(
            self._threads, self._decode, replace(part, source=source), kind, self._room
        )

    def read(self, parts: Sequence[PromptPart]) -> Sequence[Loaded]:
        self._check(parts)
        return list(self._threads.map(self._read, parts))

    def _read(self, part: PromptPart) -> Loaded:
        source, kind = part.source, None
        if _is_remote(part):
            source, kind = self._fetch(part)
        return self._decode(replace(part, source=source), kind)

    def _check(self, parts: Sequence[PromptPart]) -> None:
        why = refusal(self._config)
        for part in parts:
            if part.kind not in ("image", "video"):
                raise refused(
                    part.param,
                    f"parts of kind {part.kind!r} are not supported, only images and videos are.",
                    "unsupported_parameter",
                )
            if why is not None:
                raise refused(
                    part.param, f"{part.kind}s are not supported: {why}.", "unsupported_parameter"
                )
            if part.kind == "video":
                self._check_videos(part.param)
        videos = [part for part in parts if part.kind == "video"]
        settings = self._settings
        for many, most, what in (
            (parts, settings.max_images, "images"),
            (videos, settings.max_videos, "videos"),
        ):
            if len(many) > most:
                raise refused(
                    many[most].param,
                    f"the request has {len(many)} {what}; at most {most} are allowed "
                    f"(--max-{what}).",
                    "too_many_images",
                )

    def _check_videos(self, param: str) -> None:
        """Raises RequestError if the engine takes no videos."""
        why = None
        if "tokens_per_second" in self._stored.get("vision_config", {}):
            why = "the model counts seconds in rotary positions"
        elif self._config.tokenizer_path is None:
            why = "the times of frames need a tokenizer (--skip-tokenizer-init)"
        elif self._video_tokens is None:
            why = f"the model {self._config.model_name!r} has no tokens for them"
        else:
            try:
                _ = self._videos
            except ModelError as error:
                why = str(error)
        if why is not None:
            raise refused(param, f"videos are not supported: {why}.", "unsupported_parameter")

    @functools.cached_property
    def _video_tokens(self) -> VideoTokens | None:
        names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
        found = [self._stored.get(name) for name in names]
        return VideoTokens(*found) if all(type(each) is int for each in found) else None

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """The model's tokenizer, for the times of frames."""
        if self._config.tokenizer_path is None:
            raise RuntimeError("an engine without a tokenizer reads no videos")
        return Tokenizer.from_path(self._config.tokenizer_path)

    @functools.cached_property
    def _videos(self) -> VideoSettings:
        return VideoSettings.from_folder(Path(self._config.model_path), self._known.settings)

    @property
    def _known(self) -> ImageProcessor:
        if self.processor is None:
            raise RuntimeError("a model without images reads none")
        return self.processor

    def _decode(
        self, part: PromptPart, kind: str | None = None, room: PixelRoom | None = None
    ) -> Loaded:
        """Decodes one part into shared memory.

        Args:
            kind: the media type that a host has declared.
            room: counts the memory.
        """
        try:
            if part.kind == "video":
                return self._video(part, kind, room)
            image = self._decoded(self._known, part, kind)
            grid = self._known.size(image.width, image.height, cast("Detail", part.detail))
        except ImageError as error:
            raise refused(part.param, str(error), error.code or "invalid_image") from None
        return self._shared(image, grid, part.param, room)

    def _shared(
        self, image: DecodedImage, grid: ImageGrid, param: str, room: PixelRoom | None
    ) -> LoadedImage:
        digest = self._known.digest(image, grid)
        pixels = SharedPixels(image.pixels, None if room is None else room.give_back)
        if room is not None:
            room.take(image.pixels.nbytes)
        return LoadedImage(pixels, grid, digest, param)

    def _video(self, part: PromptPart, kind: str | None, room: PixelRoom | None) -> LoadedVideo:
        """Decodes the frames of a video, and puts them into groups."""
        settings, processor = self._videos, self._known
        video = self._frames(part, kind)
        height, width, _ = video.pixels[0].shape
        rows, columns = settings.size(len(video.pixels), width, height)
        merge, frames = processor.settings.merge, processor.settings.temporal
        grid = ImageGrid(frames, rows * merge, columns * merge, rows * columns, merge)
        groups, times = [], []
        for places in settings.groups(range(len(video.pixels))):
            pixels = np.concatenate([video.pixels[place] for place in places])
            image = DecodedImage(pixels, width, frames * height)
            groups.append(self._shared(image, grid, part.param, room))
            times.append(time_text([video.indices[place] for place in places], video.fps))
        return LoadedVideo(groups, times, part.param)

    def _frames(self, part: PromptPart, kind: str | None) -> VideoFrames:
        """Returns the frames of a video in any form."""
        source, settings, metadata = part.source, self._settings, dict[str, Any]()
        most = settings.max_video_bytes
        reader = FrameReader(
            self._known,
            self._videos,
            VideoLimits(settings.max_video_frames, settings.max_video_pixels, self._limits),
        )
        if isinstance(source, str) and is_data_uri(source):
            files, kind = decode_frames(source, most, settings.max_video_frames, part.param)
            if kind == "video/jpeg":
                return reader.of_images(files, metadata)
            (source,) = files
        elif isinstance(source, str):
            source = decode_base64(source, most, part.param, "--max-video-bytes")
        if isinstance(source, Path):
            source = self._file(source, part.param, most, "--max-video-bytes")
        if isinstance(source, bytes):
            return reader.of_file(source)
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
            source, metadata = source[0], dict(source[1])
        if not isinstance(source, Sequence) and not hasattr(source, "__array__"):
            raise ImageError(f"{type(source).__name__} is no video.")
        return reader.of_images(list(source), metadata)

    def _decoded(
        self, processor: ImageProcessor, part: PromptPart, kind: str | None
    ) -> DecodedImage:
        source, most = part.source, self._settings.max_image_bytes
        if isinstance(source, str) and is_data_uri(source):
            source, kind = decode_data_uri(source, most, part.param)
        elif isinstance(source, str):
            source = decode_base64(source, most, part.param)
        if isinstance(source, Path):
            source = self._file(source, part.param, most, "--max-image-bytes")
        if isinstance(source, bytes):
            return processor.open(source, self._limits, kind)
        return processor.convert(source, self._limits)

    def _file(self, path: Path, param: str, most: int, flag: str) -> bytes:
        try:
            size = path.stat().st_size
            if size <= most:
                return path.read_bytes()
        except OSError as error:
            raise refused(param, f"the file cannot be read: {error.strerror}.") from None
        raise too_large(size, most, param, flag)

    def _fetch(self, part: PromptPart) -> tuple[bytes, str | None]:
        settings, video = self._settings, part.kind == "video"
        return fetch(
            part.source,
            settings.allow_image_hosts,
            most=settings.max_video_bytes if video else settings.max_image_bytes,
            seconds=settings.image_fetch_seconds,
            param=part.param,
            flag="--max-video-bytes" if video else "--max-image-bytes",
        )

    # -- places --------------------------------------------------------------------------------

    def place(self, ids: Int32, parts: Sequence[Any]) -> tuple[Int32, PromptInputs]:
        if self.processor is None:
            raise RuntimeError("a model without images places none")
        token_id, vocab_size = self.processor.token_id, self._config.vocab_size
        images = [part for part in parts if isinstance(part, LoadedImage)]
        videos = [part for part in parts if isinstance(part, LoadedVideo)]
        _check_places(ids, token_id, images, "images", parts[0].param)
        if ids[-1] == token_id:
            raise refused(parts[-1].param, "a prompt must not end with an image.")
        tokens = self._video_tokens if videos else None
        if tokens is None:
            placed = place_images(ids, images, (token_id,), vocab_size)
        else:
            _check_places(ids, tokens.token_id, videos, "videos", parts[0].param)
            texts = [[self._time(text) for text in video.times] for video in videos]
            ids = expand_videos(ids, texts, tokens)
            groups = iter([group for video in videos for group in video.groups])
            left = iter(images)
            both = ids[np.isin(ids, (token_id, tokens.token_id))].tolist()
            ordered = [next(left) if each == token_id else next(groups) for each in both]
            self._check_most(ordered)
            placed = place_images(ids, ordered, (token_id, tokens.token_id), vocab_size)
        if placed is None:
            raise RuntimeError("a prompt has not as many places as images")
        return placed

    def _time(self, text: str) -> Int32:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _check_most(self, images: Sequence[LoadedImage]) -> None:
        most = self._settings.max_images
        if len(images) > most:
            frames = self._known.settings.temporal
            raise refused(
                images[most].param,
                f"the request has {len(images)} images; at most {most} are allowed, and {frames} "
                "frames of a video count as one (--max-images).",
                "too_many_images",
            )


def _is_remote(part: PromptPart) -> bool:
    return isinstance(part.source, str) and is_address(part.source)


def _check_places(
    ids: Int32, token_id: int, parts: Sequence[Loaded], kind: str, param: str
) -> None:
    """Raises RequestError if a prompt has not a token for each part of a kind."""
    found, wanted = int((ids == token_id).sum()), len(parts)
    if found != wanted:
        raise RequestError(
            f"the prompt has places for {found} {kind}, but the request has {wanted}: each of the "
            f"{kind} needs one token {token_id}, which the model's chat template writes",
            param,
            "invalid_image_places",
        )


def _close(task: asyncio.Task[Loaded]) -> None:
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
