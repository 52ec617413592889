"""The published image processor of a checkpoint: sizes, decoding and digests, without torch.

`size` is the only function that says how many positions an image takes. API processes and the
engine call it. `prepare` (`preparation.py`) computes the pixels on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError

Detail = Literal["auto", "low", "high"]
Pixels = npt.NDArray[np.uint8]


class ImageError(RequestError):
    """An image cannot be used: it is damaged, too large, or of an unknown format.

    `code` is "invalid_image" or "image_too_large". The caller sets `param`.
    """

    def __init__(self, message: str, code: str = "invalid_image") -> None:
        super().__init__(message, None, code)


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """An image as the tower and the language model see it.

    Attributes:
        t: time steps, 1 for an image.
        h: rows of patches.
        w: columns of patches.
        tokens: positions in the prompt, t * h * w / merge².
        merge: side of the square of patches that becomes one token.
    """

    t: int
    h: int
    w: int
    tokens: int
    merge: int = 2

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w

    @property
    def columns(self) -> int:
        """Columns of tokens, which three-part rotary positions follow."""
        return self.w // self.merge


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of what `ImageProcessor.open` decodes.

    Attributes:
        max_bytes: bytes of a file.
        max_pixels: width times height, before the processor resizes the image.
        max_frames: frames of a file; the first one is used.
    """

    max_bytes: int = 64 << 20
    max_pixels: int = 64 << 20
    max_frames: int = 1


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An upright RGB image.

    Attributes:
        pixels: uint8 [height, width, 3].
        width: columns of pixels.
        height: rows of pixels.
    """

    pixels: Pixels
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """The settings of a checkpoint's image processor (preprocessor_config.json).

    Attributes:
        patch: side of a patch in pixels.
        merge: side of the square of patches that becomes one token.
        temporal: frames of a patch; an image repeats its one frame.
        min_pixels: least width times height after the resize.
        max_pixels: most width times height after the resize.
        scale: multiplies bytes.
        mean: subtracted from each channel after `scale`.
        std: divides each channel.
        resample: Pillow's number of the filter; 3 is bicubic.
        resize: whether the image is resized.
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: int = 3
    resize: bool = True


class ImageProcessor:
    """Sizes, opens and identifies images for one checkpoint.

    Attributes:
        settings: the checkpoint's settings.
        tower: identifies the tower's weights, which are a part of every digest.
        token_id: the token that stands for an image in a rendered prompt.
    """

    def __init__(self, settings: ProcessorSettings, *, tower: bytes, token_id: int) -> None:
        self.settings = settings
        self.tower = tower
        self.token_id = token_id

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any]) -> ImageProcessor:
        """Reads preprocessor_config.json or processor_config.json.

        Args:
            folder: the model's folder.
            config: its config.json.

        Raises:
            ModelError: there is no such file, or a setting is invalid or not supported.
        """
        raise NotImplementedError

    def size(self, width: int, height: int, detail: Detail = "auto") -> ImageGrid:
        """Returns the grid of an image.

        Args:
            width: columns of pixels.
            height: rows of pixels.
            detail: "low" lowers the most pixels to 512 x 512. "auto" and "high" leave the
                checkpoint's limits.

        Raises:
            ImageError: one side is more than 200 times as long as the other.
        """
        raise NotImplementedError

    def open(self, data: bytes, limits: ImageLimits) -> DecodedImage:
        """Decodes an image with Pillow, as `transformers` does for its processor.

        The image is turned upright by its EXIF orientation. Transparent images are laid over white.

        Raises:
            ImageError: the data is no image, damaged, truncated or exceeds a limit.
        """
        raise NotImplementedError

    def digest(self, image: DecodedImage, grid: ImageGrid) -> bytes:
        """Returns 32 bytes that identify the tower's output for an image.

        It hashes the pixels, the grid, the settings and the tower, and not the file.
        """
        raise NotImplementedError
