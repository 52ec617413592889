"""Decoding of image files, settings of processors, and digests."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.errors import ModelError
from quire.features.images.processor import (
    DecodedImage,
    ImageError,
    ImageGrid,
    ImageLimits,
    ImageProcessor,
    ProcessorSettings,
)

SETTINGS = ProcessorSettings(14, 2, 2, 3136, 1 << 20, 1 / 255, (0.5,) * 3, (0.5,) * 3)
PROCESSOR = ImageProcessor(SETTINGS, tower=b"tower", token_id=7)
LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=100_000)
CONFIG = {
    "image_token_id": 7,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}


def _drawn(mode: str, size: tuple[int, int] = (37, 23)) -> Image.Image:
    draw = np.random.default_rng(3)
    width, height = size
    if mode == "I;16":
        return Image.fromarray(draw.integers(0, 600, (height, width), dtype=np.uint16))
    if mode in ("P", "1"):
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        return image.convert(mode)
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = draw.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(), mode)


def _file(image: Image.Image, form: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


FILES = {
    "jpeg": ("RGB", "JPEG", {}),
    "gray": ("L", "JPEG", {}),
    "cmyk": ("CMYK", "JPEG", {}),
    "png": ("RGB", "PNG", {}),
    "alpha": ("RGBA", "PNG", {}),
    "gray with alpha": ("LA", "PNG", {}),
    "bits": ("1", "PNG", {}),
    "16 bits": ("I;16", "PNG", {}),
    "palette": ("P", "PNG", {}),
    "transparent palette": ("P", "PNG", {"transparency": 5}),
    "transparent color": ("RGB", "PNG", {"transparency": (255, 0, 0)}),
    "gif": ("P", "GIF", {"transparency": 3}),
    "webp": ("RGBA", "WEBP", {"lossless": True}),
    "bmp": ("RGB", "BMP", {}),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_equal_those_that_the_published_processor_gets(name: str) -> None:
    mode, form, options = FILES[name]
    data = _file(_drawn(mode), form, **options)
    found = PROCESSOR.open(data, LIMITS)
    oracle = Qwen2VLImageProcessorPil(do_resize=False)
    expected = oracle.process_image(Image.open(io.BytesIO(data)), do_convert_rgb=True)
    assert np.array_equal(found.pixels, np.moveaxis(expected, 0, -1))
    assert (found.width, found.height) == (37, 23)
    assert found.pixels.dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = _drawn("RGB")
    found = PROCESSOR.open(_file(image, "PNG", exif=exif), LIMITS)
    pixels = np.asarray(image)
    turned = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels, 2).transpose(1, 0, 2),
        8: np.rot90(pixels),
    }[orientation]
    assert np.array_equal(found.pixels, turned)


def test_the_first_picture_of_a_camera_file_is_read() -> None:
    first, second = _drawn("RGB"), _drawn("RGB", (10, 9))
    data = _file(first, "MPO", save_all=True, append_images=[second], quality=95)
    assert PROCESSOR.open(data, LIMITS, "image/jpeg").width == 37


def _png_of(width: int, height: int) -> bytes:
    """Returns a PNG that declares a size and has the pixels of one row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(3 * width + 1))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


PNG = _file(_drawn("RGB"), "PNG")
ANIMATED = {"save_all": True, "append_images": [_drawn("RGB", (37, 23)).rotate(9)]}
REFUSED = {
    "nothing": (b"", None, "no image of a supported format"),
    "text": (b"hello", None, "no image of a supported format"),
    "truncated": (PNG[:-200], None, "is damaged"),
    "cut header": (PNG[:20], None, "image"),
    "truncated jpeg": (_file(_drawn("RGB"), "JPEG")[:-40], None, "is damaged"),
    "a bomb": (_png_of(1000, 101), None, "1000 x 101 pixels, but at most 100000"),
    "a large bomb": (_png_of(100_000, 100_000), None, "pixels"),
    "many bytes": (PNG + bytes(1 << 20), None, "bytes, but at most 1048576"),
    "frames": (_file(_drawn("RGB"), "GIF", **ANIMATED), None, "several frames"),
    "frames of a png": (_file(_drawn("RGB"), "PNG", **ANIMATED), None, "several frames"),
    "frames of a webp": (_file(_drawn("RGB"), "WEBP", **ANIMATED), None, "several frames"),
    "a tiff": (_file(_drawn("RGB"), "TIFF"), None, "no image of a supported format"),
    "a wrong type": (PNG, "image/jpeg", "a PNG file, but declared as image/jpeg"),
    "an unknown type": (PNG, "application/pdf", "'application/pdf' is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name: str) -> None:
    data, media_type, message = REFUSED[name]
    with pytest.raises(ImageError, match=message) as caught:
        PROCESSOR.open(data, LIMITS, media_type)
    large = name in ("a bomb", "a large bomb", "many bytes")
    assert caught.value.code == ("image_too_large" if large else "invalid_image")


def test_a_declared_type_may_have_parameters() -> None:
    assert PROCESSOR.open(PNG, LIMITS, "Image/PNG; charset=utf-8").height == 23


def test_narrow_images_are_refused() -> None:
    assert PROCESSOR.size(1, 200).h > 1
    with pytest.raises(ImageError, match="1 x 201 pixels"):
        PROCESSOR.size(1, 201)


def test_low_detail_takes_fewer_tokens() -> None:
    auto, high, low = (PROCESSOR.size(1000, 900, detail) for detail in ("auto", "high", "low"))
    assert auto == high == ImageGrid(1, 64, 72, 1152)
    assert low.tokens <= 512 * 512 // 28**2


def test_digests_tell_what_the_tower_sees() -> None:
    pixels = np.asarray(_drawn("RGB")).copy()
    image = DecodedImage(pixels, 37, 23)
    grid = PROCESSOR.size(37, 23)
    digest = PROCESSOR.digest(image, grid)
    assert len(digest) == 32
    as_png = PROCESSOR.open(_file(_drawn("RGB"), "PNG"), LIMITS)
    as_webp = PROCESSOR.open(_file(_drawn("RGB"), "WEBP", lossless=True), LIMITS)
    assert PROCESSOR.digest(as_png, grid) == PROCESSOR.digest(as_webp, grid) == digest
    other = ImageProcessor(SETTINGS, tower=b"other", token_id=7)
    changed = pixels.copy()
    changed[0, 0, 0] ^= 1
    digests = {
        digest,
        other.digest(image, grid),
        PROCESSOR.digest(image, ImageGrid(1, 4, 8, 8)),
        PROCESSOR.digest(DecodedImage(changed, 37, 23), grid),
        PROCESSOR.digest(DecodedImage(pixels.reshape(37, 23, 3), 23, 37), grid),
    }
    assert len(digests) == 5


def _read(folder: Path, settings: Any, name: str = "preprocessor_config.json") -> ImageProcessor:
    (folder / name).write_text(json.dumps(settings), "utf-8")
    return ImageProcessor.from_folder(folder, CONFIG)


def test_settings_of_published_files(tmp_path: Path) -> None:
    qwen2 = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    found = _read(tmp_path, qwen2)
    assert (found.token_id, found.settings.max_pixels, found.settings.patch) == (7, 12845056, 14)
    qwen3 = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    found = _read(tmp_path, qwen3)
    assert (found.settings.min_pixels, found.settings.mean) == (65536, (0.5, 0.5, 0.5))
    (tmp_path / "preprocessor_config.json").unlink()
    found = _read(tmp_path, {"image_processor": qwen3}, "processor_config.json")
    assert found.settings.max_pixels == 16777216


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "must hold a JSON object"),
        ({"image_processor_type": "PixtralImageProcessor"}, "'PixtralImageProcessor' is not"),
        ({"do_resize": False}, "do_resize=False is not supported"),
        ({"resample": 2}, "resample=2 is not supported; expected 3"),
        ({"patch_size": 16}, "patch_size=16 differs from patch_size=14"),
        ({"merge_size": 1}, "merge_size=1 differs from spatial_merge_size=2"),
        ({"patch_size": True}, "patch_size must be an integer"),
        ({"patch_size": 1 << 40}, "patch_size must be an integer"),
        ({"size": 3}, "size must be an object"),
        ({"size": {"height": 3, "width": 3}}, "shortest_edge must be an integer"),
        ({"min_pixels": 9, "max_pixels": 8}, "the least pixels, 9, exceed the most, 8"),
        ({"image_mean": [1, 2]}, "image_mean must be 3 finite numbers"),
        ({"image_std": 0}, "image_std must be 3 finite numbers"),
        ({"rescale_factor": "x"}, "rescale_factor must be 1 finite numbers"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, settings)


def test_folders_without_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no preprocessor_config"):
        ImageProcessor.from_folder(tmp_path, CONFIG)
    (tmp_path / "preprocessor_config.json").write_text("{", "utf-8")
    with pytest.raises(ModelError, match="cannot read"):
        ImageProcessor.from_folder(tmp_path, CONFIG)
    (tmp_path / "preprocessor_config.json").write_text("{}", "utf-8")
    with pytest.raises(ModelError, match="image_token_id must be a token id"):
        ImageProcessor.from_folder(tmp_path, {})
