"""Videos as frames: which frames the model sees, in which size, and at which times.

Neighbouring frames become one group, which the tower sees as an image whose patches have a depth.
A prompt names the time of each group. So a video is a series of images with texts between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.features.images.processor import (
    MOST_RATIO,
    ImageError,
    ProcessorSettings,
    read_settings,
)
from quire.system import read_bounded

_FILE = "video_preprocessor_config.json"
_QWEN3: dict[str, Any] = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "max_video_tokens": 768,
}
"""The settings of `Qwen3VLVideoProcessor` that a file need not have. Others are the images'."""


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """The settings of a checkpoint's video processor.

    Attributes:
        pixels: as those of an image, but `min_pixels` and `max_pixels` are those of all frames.
        fps: frames a second that the model sees.
        min_frames: least frames, if the video has as many.
        max_frames: most frames.
        frame_tokens: most tokens of a frame; None: only the pixels of all frames are bounded.
    """

    pixels: ProcessorSettings
    fps: float
    min_frames: int
    max_frames: int
    frame_tokens: int | None

    @classmethod
    def from_folder(cls, folder: Path, images: ProcessorSettings) -> VideoSettings:
        """Reads video_preprocessor_config.json. Without it, Qwen3-VL's settings hold.

        Args:
            images: the settings of the image processor.

        Raises:
            ModelError: a setting is invalid, or prepares frames unlike images.
        """
        raw: Mapping[str, Any] = {}
        try:
            raw = json.loads(read_bounded(folder / _FILE))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"cannot read {folder / _FILE}: {error}") from error
        if not isinstance(raw, Mapping):
            raise ModelError(f"{folder / _FILE} must hold a JSON object")
        common = {
            "patch_size": images.patch,
            "merge_size": images.merge,
            "temporal_patch_size": images.temporal,
            "rescale_factor": images.scale,
            "image_mean": list(images.mean),
            "image_std": list(images.std),
        }
        given = {**_QWEN3, **common, **{k: v for k, v in raw.items() if v is not None}}
        given.pop("image_processor_type", None)
        numbers = {}
        for name in ("fps", "min_frames", "max_frames", "max_video_tokens"):
            value = given[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ModelError(f"{_FILE}: {name} must be a positive number, got {value!r}")
            numbers[name] = value
        capped = given.get("cap_pixels_per_frame") is True
        pixels = read_settings(_FILE, given)
        bounds = pixels.min_pixels, pixels.max_pixels
        if pixels != replace(images, min_pixels=bounds[0], max_pixels=bounds[1]):
            raise ModelError(f"{_FILE}: frames prepared unlike images are not supported")
        return cls(
            pixels=pixels,
            fps=float(numbers["fps"]),
            min_frames=int(numbers["min_frames"]),
            max_frames=int(numbers["max_frames"]),
            frame_tokens=int(numbers["max_video_tokens"]) if capped else None,
        )

    def frames(self, total: int, fps: float, most: int) -> list[int]:
        """Returns the indices of the frames that the model sees, evenly spread.

        Args:
            total: frames of the video.
            fps: frames a second of the video.
            most: most frames, less than `max_frames` or not.
        """
        count = int(total / fps * self.fps)
        count = min(max(count, self.min_frames), self.max_frames, total, most)
        indices: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
        return indices

    def size(self, count: int, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of tokens of each frame, as `smart_resize` does.

        Args:
            count: frames that the model sees.
            width: columns of pixels.
            height: rows of pixels.

        Raises:
            ImageError: one side is more than 200 times as long as the other.
        """
        pixels, factor = self.pixels, self.pixels.factor
        if min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > MOST_RATIO * min(width, height):
            raise ImageError(
                f"The video has {width} x {height} pixels, but one side may be at most "
                f"{MOST_RATIO} times as long as the other."
            )
        most = pixels.max_pixels
        if self.frame_tokens is not None:
            share = min(self.frame_tokens * factor**2, most // count)
            most = count * max(share, int(pixels.min_pixels * 1.05))
        rows, columns = round(height / factor), round(width / factor)
        deep = round(count / pixels.temporal) * pixels.temporal
        if deep * rows * columns * factor**2 > most:
            shrink = math.sqrt(count * height * width / most)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif deep * rows * columns * factor**2 < pixels.min_pixels:
            grow = math.sqrt(pixels.min_pixels / (count * height * width))
            rows = math.ceil(height * grow / factor)
            columns = math.ceil(width * grow / factor)
        return rows, columns

    def groups(self, indices: Sequence[int]) -> list[list[int]]:
        """Returns the frames of each group. The last frame fills the last group."""
        size = self.pixels.temporal
        filled = [*indices, *([indices[-1]] * (-len(indices) % size))]
        return [filled[first : first + size] for first in range(0, len(filled), size)]


def time_text(group: Sequence[int], fps: float) -> str:
    """Returns the text before a group of frames, which says its time.

    Args:
        group: indices of the frames in the video.
        fps: frames a second of the video.
    """
    return f"<{(group[0] / fps + group[-1] / fps) / 2:.1f} seconds>"


def mean_fps(durations: Sequence[float]) -> float:
    """Returns the frames a second of frames that last so many milliseconds each."""
    total = sum(Fraction(each) for each in durations)
    return float(1000 * len(durations) / total) if total > 0 else 1.0
