"""The frames of a video, from the forms in which requests have it.

- a list of images, `data:video/jpeg;base64,FRAME,FRAME`, or an array of frames;
- an animated GIF, PNG or WebP file;
- an MP4, WebM or Matroska file, if PyAV is installed.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError

from quire.features.images.processor import ImageError, ImageLimits, ImageProcessor, Pixels, opaque
from quire.features.images.videos import VideoSettings, mean_fps

_ANIMATED = ("GIF", "PNG", "WEBP")
"""Pillow's formats that hold several frames."""
_CONTAINERS = {b"ftyp": "mp4", b"\x1aE\xdf\xa3": "matroska"}
"""FFmpeg's formats, by the bytes from the fifth and the first on. It opens no others, because some
formats name further files."""
_MOST_DECODED = 16
"""Most frames that are decoded for each frame that the model may see."""
_MOST_FRAMES = 1 << 16
"""Most frames of a file: 36 minutes of 30 frames a second. Tiny frames cost time too."""


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """The frames that the model sees.

    Attributes:
        pixels: uint8 [height, width, 3] of each, all of one size.
        indices: the place of each in the video.
        fps: frames a second of the video.
    """

    pixels: list[Pixels]
    indices: list[int]
    fps: float


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of the videos that are decoded.

    Attributes:
        frames: frames that the model sees.
        pixels: pixels of all of them.
        image: limits of each frame.
    """

    frames: int
    pixels: int
    image: ImageLimits


class FrameReader:
    """Picks and decodes frames.

    Its methods raise ImageError for a video that is damaged, too large, or of an unknown form.

    Args:
        processor: decodes images.
        settings: say which frames the model sees.
        limits: checked before any pixel is decoded.
    """

    def __init__(
        self, processor: ImageProcessor, settings: VideoSettings, limits: VideoLimits
    ) -> None:
        self._processor = processor
        self._settings = settings
        self._limits = limits

    def of_images(self, images: Sequence[Any], metadata: Mapping[str, Any]) -> VideoFrames:
        """Returns frames that a caller has picked: files, Pillow images or arrays.

        Args:
            metadata: as vLLM has it. "fps" is 1 if it is not there. "frames_indices" are the places
                of the frames in the video. With "do_sample_frames", the settings pick some.
        """
        fps = metadata.get("fps") or 1.0
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e6:
            raise ImageError(f"A video has a positive number of frames a second, not {fps!r}.")
        indices = _indices(metadata.get("frames_indices"), len(images))
        if len(indices) != len(images):
            raise ImageError(f"The video has {len(images)} frames, but {len(indices)} indices.")
        if metadata.get("do_sample_frames"):
            picked = self._pick(len(images), fps)
            images, indices = [images[i] for i in picked], [indices[i] for i in picked]
        self._check_count(len(images))
        limits = self._limits.image
        pixels = []
        for image in images:
            # Sizes of files are known one by one, so the sum is checked after each frame.
            decoded = (
                self._processor.open(image, limits)
                if isinstance(image, bytes)
                else self._processor.convert(image, limits)
            )
            pixels.append(decoded.pixels)
            self._check_pixels(decoded.width, decoded.height, len(pixels))
        if len({each.shape for each in pixels}) > 1:
            raise ImageError("The frames of a video must have one size.")
        return VideoFrames(pixels, indices, float(fps))

    def of_file(self, data: bytes) -> VideoFrames:
        """Returns the frames of a file that the settings pick."""
        container = _CONTAINERS.get(data[4:8]) or _CONTAINERS.get(data[:4])
        try:
            return self._of_container(data, container) if container else self._animated(data)
        except ImageError:
            raise
        except UnidentifiedImageError:
            raise ImageError(
                "The data is no video of a supported format: GIF, PNG, WEBP, MP4, WEBM."
            ) from None
        # Decoders raise errors of many types for damaged files.
        except Exception as error:
            raise ImageError(f"The video is damaged: {error}") from error

    def _animated(self, data: bytes) -> VideoFrames:
        with Image.open(io.BytesIO(data), formats=_ANIMATED) as image:
            total = getattr(image, "n_frames", 1)
            size = image.size
            self._check_length(total, *size)
            durations = []
            for frame in ImageSequence.Iterator(image):
                # A frame of a GIF file may be larger than the frames before it.
                _check_size(frame.size, size)
                durations.append(_duration(frame))
            fps = mean_fps(durations)
            indices = self._pick(total, fps)
            self._check_pixels(*size, len(indices))
            pixels = []
            for index in indices:
                image.seek(index)
                pixels.append(np.ascontiguousarray(opaque(image)))
            return VideoFrames(pixels, indices, fps)

    def _of_container(self, data: bytes, name: str) -> VideoFrames:
        try:
            import av  # An optional package.
        except ImportError:
            raise ImageError(
                "Files of this format need PyAV, which the server does not have (pip install av). "
                "Send frames, as in 'data:video/jpeg;base64,FRAME,FRAME', or an animated GIF, PNG "
                "or WebP."
            ) from None

        with av.open(io.BytesIO(data), format=name) as file:
            stream = file.streams.video[0]
            fps, size = float(stream.average_rate or 1), (stream.width, stream.height)
            total = stream.frames or sum(packet.size > 0 for packet in file.demux(stream))
        self._check_length(total, *size)
        indices = self._pick(total, fps)
        self._check_pixels(*size, len(indices))
        wanted, pixels = set(indices), list[Pixels]()
        with av.open(io.BytesIO(data), format=name) as file:
            stream = file.streams.video[0]
            # A header may promise fewer and smaller frames than the stream has.
            stream.codec_context.options = {"max_pixels": str(self._limits.image.max_pixels)}
            decoded = itertools.islice(file.decode(stream), indices[-1] + 1)
            for index, frame in enumerate(decoded):
                _check_size((frame.width, frame.height), size)
                if index in wanted:
                    pixels.append(frame.to_ndarray(format="rgb24"))
        if len(pixels) != len(wanted):
            raise ImageError(f"The video ends before its frame {indices[-1]}.")
        return VideoFrames(pixels, indices, fps)

    # -- limits --------------------------------------------------------------------------------

    def _pick(self, total: int, fps: float) -> list[int]:
        self._check_count(min(total, self._settings.pixels.temporal))
        return self._settings.frames(total, fps, self._limits.frames)

    def _check_count(self, count: int) -> None:
        least = self._settings.pixels.temporal
        if count < least:
            raise ImageError(f"The video has {count} frames; it must have at least {least}.")
        if count > self._limits.frames:
            raise ImageError(
                f"The video has {count} frames; at most {self._limits.frames} are allowed "
                "(--max-video-frames).",
                "image_too_large",
            )

    def _check_length(self, total: int, width: int, height: int) -> None:
        """Checks a file that must be decoded whole to pick some of its frames."""
        self._check_frame(width, height)
        if total > _MOST_FRAMES:
            raise ImageError(
                f"The video has {total} frames; a file may have at most {_MOST_FRAMES}.",
                "image_too_large",
            )
        most = _MOST_DECODED * self._limits.pixels
        if total * width * height > most:
            raise ImageError(
                f"The video has {total} frames of {width} x {height} pixels; at most {most} pixels "
                f"are decoded, {_MOST_DECODED} times as many as the model may see "
                "(--max-video-pixels).",
                "image_too_large",
            )

    def _check_frame(self, width: int, height: int) -> None:
        if width * height > self._limits.image.max_pixels:
            raise ImageError(
                f"A frame has {width} x {height} pixels; at most {self._limits.image.max_pixels} "
                "are allowed (--max-image-pixels).",
                "image_too_large",
            )

    def _check_pixels(self, width: int, height: int, count: int) -> None:
        self._check_frame(width, height)
        if width * height * count > self._limits.pixels:
            raise ImageError(
                f"{count} frames of {width} x {height} pixels exceed the {self._limits.pixels} "
                "pixels that are allowed (--max-video-pixels).",
                "image_too_large",
            )


def _indices(given: Any, count: int) -> list[int]:
    """Returns the places of a caller's frames in the video."""
    try:
        return list(range(count)) if given is None else [int(each) for each in given]
    except (TypeError, ValueError, OverflowError):
        raise ImageError("frames_indices must be integers.") from None


def _check_size(size: tuple[int, int], first: tuple[int, int]) -> None:
    if size != first:
        raise ImageError(
            f"The frames of a video must have one size, but one has {size[0]} x {size[1]} pixels, "
            f"and the first {first[0]} x {first[1]}."
        )


def _duration(frame: Image.Image) -> float:
    """Returns the milliseconds that a frame is shown."""
    frame.load()  # A WebP file says it only then.
    return float(frame.info.get("duration") or 100)
