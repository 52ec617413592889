"""The image processor of a checkpoint: sizes, decoding and digests, without torch.

`size` is the only function that says how many positions an image takes. API processes and the
engine call it. `prepare` (`preparation.py`) computes the pixels on the device.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from quire.errors import ModelError, RequestError
from quire.system import read_bounded

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
        frames: frames of a patch that differ. An image has one, which its patches repeat.
        h: rows of patches.
        w: columns of patches.
        tokens: positions in the prompt, h * w / merge².
        merge: side of the square of patches that becomes one token.
    """

    frames: int
    h: int
    w: int
    tokens: int
    merge: int = 2

    @property
    def patches(self) -> int:
        return self.h * self.w

    @property
    def columns(self) -> int:
        """Columns of tokens, which three-part rotary positions follow."""
        return self.w // self.merge


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of the images that `ImageProcessor.open` decodes.

    Attributes:
        max_bytes: bytes of a file.
        max_pixels: width times height of the file's image, before the processor resizes it.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 64 << 20


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An upright RGB image.

    Attributes:
        pixels: uint8 [height, width, 3], contiguous.
        width: columns of pixels.
        height: rows of pixels.
    """

    pixels: Pixels
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """The settings of a checkpoint's image processor.

    Attributes:
        patch: side of a patch in pixels.
        merge: side of the square of patches that becomes one token.
        temporal: frames of a patch; an image repeats its one frame.
        min_pixels: least width times height after the resize.
        max_pixels: most width times height after the resize.
        scale: multiplies bytes.
        mean: subtracted from each channel after `scale`.
        std: divides each channel.
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch * self.merge

    def values(self) -> npt.NDArray[np.float32]:
        """Returns the number that each byte of each channel becomes, float32 [3, 256].

        `transformers` multiplies in float64, rounds, and normalizes in float32.
        """
        scaled = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (self.mean, self.std))
        found: npt.NDArray[np.float32] = (scaled - mean) / std
        return found


# Pillow knows a format once its module is imported.
_FORMATS: tuple[str, ...] = (
    BmpImagePlugin.BmpImageFile.format,
    GifImagePlugin.GifImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    PngImagePlugin.PngImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
)
"""Formats that are decoded."""
_CAMERA = "MPO"
"""The name of a JPEG file in which a camera stored further pictures behind the first."""
_TYPES = {
    "image/bmp": ("BMP",),
    "image/gif": ("GIF",),
    "image/jpeg": ("JPEG", _CAMERA),
    "image/jpg": ("JPEG", _CAMERA),
    "image/png": ("PNG",),
    "image/webp": ("WEBP",),
}
"""The formats of each media type."""
_LOW_PIXELS = 512 * 512
MOST_RATIO = 200
"""Largest ratio of an image's sides. Qwen's processor refuses larger ones."""
_MOST_SIDE = 1 << 14
"""Largest side of a patch, and most patches or frames that become one."""
_BICUBIC = 3
"""Pillow's number of the filter."""
_TYPES_OF_PROCESSORS = (
    "Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil",
)  # fmt: skip
_ON = ("do_convert_rgb", "do_normalize", "do_rescale", "do_resize")
"""Steps that must not be switched off."""
_QWEN: dict[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}
"""Defaults of Qwen's processor."""


class ImageProcessor:
    """Sizes, decodes and identifies images for one checkpoint.

    Attributes:
        settings: the checkpoint's settings.
        tower: identifies the tower. It is a part of every digest.
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
        name, raw = _stored_settings(folder)
        settings = read_settings(name, raw)
        vision = config.get("vision_config")
        vision = vision if isinstance(vision, Mapping) else {}
        for key, other, own in (
            ("patch_size", "patch_size", settings.patch),
            ("merge_size", "spatial_merge_size", settings.merge),
            ("temporal_patch_size", "temporal_patch_size", settings.temporal),
        ):
            if vision.get(other, own) != own:
                raise ModelError(
                    f"{name}: {key}={own} differs from {other}={vision[other]!r} of vision_config "
                    "in config.json"
                )
        token = config.get("image_token_id")
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelError(f"config.json: image_token_id must be a token id, got {token!r}")
        tower = json.dumps(vision, sort_keys=True, default=str).encode()
        return cls(settings, tower=tower, token_id=token)

    def size(self, width: int, height: int, detail: Detail = "auto") -> ImageGrid:
        """Returns the grid of an image.

        Args:
            width: columns of pixels.
            height: rows of pixels.
            detail: "low" lowers the most pixels to 512 x 512. "auto" and "high" keep the
                checkpoint's limits.

        Raises:
            ImageError: one side is more than 200 times as long as the other.
        """
        settings = self.settings
        if max(width, height) > MOST_RATIO * min(width, height):
            raise ImageError(
                f"The image has {width} x {height} pixels, but one side may be at most "
                f"{MOST_RATIO} times as long as the other."
            )
        most = settings.max_pixels
        if detail == "low":
            most = max(settings.min_pixels, min(most, _LOW_PIXELS))
        rows, columns = _fitted(height, width, settings.factor, settings.min_pixels, most)
        h, w = rows * settings.merge, columns * settings.merge
        return ImageGrid(1, h, w, rows * columns, settings.merge)

    def open(self, data: bytes, limits: ImageLimits, media_type: str | None = None) -> DecodedImage:
        """Decodes an image as the processor of `transformers` does.

        The image is turned upright by its EXIF orientation. Transparent images are laid over white.

        Args:
            data: the file.
            limits: checked before any pixel is decoded.
            media_type: the type that the sender declares, or None.

        Raises:
            ImageError: the data is no image of a known format, is damaged or truncated, has several
                frames, is of another type than declared, or exceeds a limit.
        """
        if len(data) > limits.max_bytes:
            raise ImageError(
                f"The image has {len(data)} bytes, but at most {limits.max_bytes} are allowed.",
                "image_too_large",
            )
        known = (*_FORMATS, _CAMERA) if media_type is None else _formats_of(media_type)
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check(image, limits, media_type, known)
                ImageOps.exif_transpose(image, in_place=True)
                pixels = np.asarray(opaque(image))
        except ImageError:
            raise
        except Image.DecompressionBombError as error:
            raise ImageError(f"The image is too large: {error}", "image_too_large") from error
        except UnidentifiedImageError as error:
            raise ImageError(
                f"The data is no image of a supported format: {', '.join(_FORMATS)}."
            ) from error
        # Pillow's decoders raise errors of many types for damaged files.
        except Exception as error:
            raise ImageError(f"The image is damaged: {error}") from error
        height, width, _ = pixels.shape
        return DecodedImage(np.ascontiguousarray(pixels), width, height)

    def convert(self, image: object, limits: ImageLimits) -> DecodedImage:
        """Returns an image of a caller of `LLM`.

        Args:
            image: a Pillow image, or an array, uint8 [height, width, 3].
            limits: as in `open`.

        Raises:
            ImageError: it is neither, or has too many pixels.
        """
        if isinstance(image, Image.Image):
            _check_pixels(image, limits)
            pixels = np.asarray(opaque(ImageOps.exif_transpose(image)))
        elif hasattr(image, "__array__"):
            pixels = np.asarray(image)
        else:
            raise ImageError(f"{type(image).__name__} is no image.")
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ImageError(
                f"An array must be uint8 [height, width, 3], not {pixels.dtype} "
                f"{list(pixels.shape)}."
            )
        height, width, _ = pixels.shape
        return DecodedImage(np.ascontiguousarray(pixels), width, height)

    def digest(self, image: DecodedImage, grid: ImageGrid) -> bytes:
        """Returns 32 bytes that identify the tower's output for an image.

        It hashes the pixels, the grid, the settings and the tower, and not the file.
        """
        # Many processors compute SHA-256 in hardware, several times as fast as BLAKE2.
        found = hashlib.sha256()
        identity = (self.settings, self.tower, grid, image.pixels.shape)
        found.update(repr(identity).encode())
        found.update(image.pixels.data)
        return found.digest()


def _stored_settings(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Returns the name and the content of the file with the image processor's settings."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            raw = json.loads(read_bounded(folder / name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"cannot read {folder / name}: {error}") from error
        if isinstance(raw, Mapping):
            raw = raw.get("image_processor", raw)
        if not isinstance(raw, Mapping):
            raise ModelError(f"{folder / name} must hold a JSON object")
        if "image_processor_type" in raw or name == "preprocessor_config.json":
            return name, raw
    raise ModelError(
        f"{folder} has no preprocessor_config.json, which says how images are resized; "
        "--language-model-only serves the model without images"
    )


def read_settings(name: str, raw: Mapping[str, Any]) -> ProcessorSettings:
    """Returns the settings in a file. `name` is the file, for errors."""
    kind = raw.get("image_processor_type", _TYPES_OF_PROCESSORS[0])
    if kind not in _TYPES_OF_PROCESSORS:
        raise ModelError(
            f"{name}: image_processor_type {kind!r} is not supported; expected one of: "
            f"{', '.join(_TYPES_OF_PROCESSORS)}"
        )
    for key in _ON:
        if raw.get(key) not in (None, True):
            raise ModelError(f"{name}: {key}={raw[key]!r} is not supported")
    if raw.get("resample") not in (None, _BICUBIC):
        raise ModelError(f"{name}: resample={raw['resample']!r} is not supported; expected 3")
    given = _QWEN | {key: value for key, value in raw.items() if value is not None}
    size = given["size"]
    if not isinstance(size, Mapping):
        raise ModelError(f"{name}: size must be an object, got {size!r}")
    least = _integer(name, {**size, **given}, ("min_pixels", "shortest_edge"), 1 << 40)
    most = _integer(name, {**size, **given}, ("max_pixels", "longest_edge"), 1 << 40)
    if least > most:
        raise ModelError(f"{name}: the least pixels, {least}, exceed the most, {most}")
    return ProcessorSettings(
        patch=_integer(name, given, ("patch_size",), _MOST_SIDE),
        merge=_integer(name, given, ("merge_size",), _MOST_SIDE),
        temporal=_integer(name, given, ("temporal_patch_size",), _MOST_SIDE),
        min_pixels=least,
        max_pixels=most,
        scale=_numbers(name, given, "rescale_factor", 1)[0],
        mean=_numbers(name, given, "image_mean", 3),
        std=_numbers(name, given, "image_std", 3, zero=False),
    )


def _integer(name: str, given: Mapping[str, Any], keys: tuple[str, ...], most: int) -> int:
    """Returns the positive integer under the first of `keys` that is there."""
    key = next((key for key in keys if given.get(key) is not None), keys[-1])
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ModelError(f"{name}: {key} must be an integer from 1 to {most}, got {value!r}")
    return value


def _numbers(
    name: str, given: Mapping[str, Any], key: str, count: int, *, zero: bool = True
) -> tuple[float, ...]:
    """Returns finite numbers. A single number stands for `count` equal ones."""
    value = given[key]
    values = value if isinstance(value, list) else [value] * count
    fine = len(values) == count and all(
        isinstance(each, int | float) and math.isfinite(each) and (zero or each) for each in values
    )
    if not fine:
        raise ModelError(f"{name}: {key} must be {count} finite numbers, got {value!r}")
    return tuple(float(each) for each in values)


def _fitted(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Returns the rows and columns of tokens of an image, as Qwen's `smart_resize` computes them.

    Args:
        factor: side of a token in pixels.
        least: least pixels after the resize.
        most: most pixels after the resize.
    """
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor * factor > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor * factor < least:
        grow = math.sqrt(least / (height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    return rows, columns


def _formats_of(media_type: str) -> tuple[str, ...]:
    """Returns Pillow's formats of a media type."""
    kind = media_type.partition(";")[0].strip().lower()
    if kind not in _TYPES:
        raise ImageError(
            f"The media type {kind[:80]!r} is not supported; expected one of: {', '.join(_TYPES)}."
        )
    return _TYPES[kind]


def _check(
    image: Image.Image, limits: ImageLimits, media_type: str | None, known: tuple[str, ...]
) -> None:
    """Raises ImageError for an image that must not be decoded. Its header is read already."""
    if image.format not in known:
        raise ImageError(f"The image is a {image.format} file, but declared as {media_type}.")
    _check_pixels(image, limits)
    if image.format != _CAMERA and getattr(image, "is_animated", False):
        raise ImageError("The image has several frames; send one frame, or a file for each.")


def _check_pixels(image: Image.Image, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(
            f"The image has {width} x {height} pixels, but at most {limits.max_pixels} pixels are "
            "allowed.",
            "image_too_large",
        )


def opaque(image: Image.Image) -> Image.Image:
    """Returns an RGB image. Transparent pixels are laid over white, as `transformers` does."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    above = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, above).convert("RGB")
