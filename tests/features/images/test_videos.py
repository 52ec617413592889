"""Videos: the frames, sizes and times of Qwen3-VL's processor, and the forms that are read."""

from __future__ import annotations

import io
import json
import math
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)
from transformers.video_utils import VideoMetadata

from quire.arrays import int32
from quire.errors import ModelError
from quire.features.images import video_frames
from quire.features.images.placement import VideoTokens, expand_videos
from quire.features.images.processor import ImageError, ImageLimits, ImageProcessor
from quire.features.images.processor import ProcessorSettings as Settings
from quire.features.images.video_frames import FrameReader, VideoLimits
from quire.features.images.videos import VideoSettings, time_text

IMAGES = Settings(16, 2, 2, 65536, 16777216, 1 / 255, (0.5,) * 3, (0.5,) * 3)
LIMITS = VideoLimits(8, 100_000, ImageLimits(100_000, 50_000))


@pytest.fixture
def settings(tmp_path: Path) -> VideoSettings:
    return VideoSettings.from_folder(tmp_path, IMAGES)


@pytest.fixture
def reader(settings: VideoSettings) -> FrameReader:
    processor = ImageProcessor(IMAGES, tower=b"", token_id=1)
    return FrameReader(processor, settings, LIMITS)


def frames(count: int, width: int = 40, height: int = 30) -> list[Image.Image]:
    draw = np.random.default_rng(count)
    many = draw.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in many]


def saved(images: list[Image.Image], form: str, **more: Any) -> bytes:
    stream = io.BytesIO()
    first, *rest = images
    several = {"save_all": True, "append_images": rest} if rest else {}
    first.save(stream, form, **several, **more)
    return stream.getvalue()


# -- as the processor does -------------------------------------------------------------------------


@pytest.mark.parametrize("total", [2, 3, 5, 17, 100, 1000, 30_000])
@pytest.mark.parametrize("fps", [1.0, 12.5, 24.0, 29.97])
def test_frames_and_times(settings: VideoSettings, total: int, fps: float) -> None:
    oracle = Qwen3VLVideoProcessor()
    expected = oracle.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), fps=2)
    found = settings.frames(total, fps, 10**6)
    assert found == expected.tolist()
    times = Qwen3VLProcessor._calculate_timestamps(None, list(found), fps, 2)
    assert [time_text(each, fps) for each in settings.groups(found)] == [
        f"<{time:.1f} seconds>" for time in times
    ]
    assert len(settings.frames(total, fps, 2)) == 2


@pytest.mark.parametrize("size", [(640, 360), (20, 3000), (1920, 1080), (17, 33), (64, 64)])
@pytest.mark.parametrize("count", [2, 3, 8, 64, 700])
def test_sizes(settings: VideoSettings, size: tuple[int, int], count: int) -> None:
    width, height = size
    expected = smart_resize(
        count, height, width, 2, 32, settings.pixels.min_pixels, settings.pixels.max_pixels
    )
    rows, columns = settings.size(count, width, height)
    assert (rows * 32, columns * 32) == expected


def test_settings_of_a_file(tmp_path: Path) -> None:
    def read(**given: Any) -> VideoSettings:
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(given))
        return VideoSettings.from_folder(tmp_path, IMAGES)

    found = read(
        fps=1, max_frames=16, size={"shortest_edge": 4096, "longest_edge": 786432},
        cap_pixels_per_frame=True, max_video_tokens=4, video_processor_type="Qwen3VLVideoProcessor",
    )  # fmt: skip
    assert (found.fps, found.max_frames, found.min_frames) == (1.0, 16, 4)
    assert found.size(4, 640, 640) == (2, 2)
    with pytest.raises(ModelError, match="fps must be"):
        read(fps=0)
    with pytest.raises(ModelError, match="unlike images"):
        read(image_mean=[0.4, 0.5, 0.5])
    (tmp_path / "video_preprocessor_config.json").write_text("[")
    with pytest.raises(ModelError, match="cannot read"):
        VideoSettings.from_folder(tmp_path, IMAGES)


def test_places_of_groups() -> None:
    tokens, ids = VideoTokens(7, 8, 9), int32([1, 8, 7, 9, 2, 7, 3])
    texts = [[int32([20]), int32([21, 22])], [int32([23])]]
    found = expand_videos(ids, texts, tokens)
    assert found.tolist() == [1, 20, 8, 7, 9, 21, 22, 8, 7, 9, 2, 23, 8, 7, 9, 3]


# -- forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_animated_files(reader: FrameReader, form: str) -> None:
    more = {"lossless": True} if form == "WEBP" else {}
    images = frames(12)
    found = reader.of_file(saved(images, form, duration=120, **more))
    assert found.fps == pytest.approx(1000 / 120)
    assert found.indices == [0, 4, 7, 11]  # two a second, but at least four
    assert [each.shape for each in found.pixels] == [(30, 40, 3)] * 4
    if form != "GIF":
        for index, pixels in zip(found.indices, found.pixels, strict=True):
            np.testing.assert_array_equal(pixels, np.asarray(images[index]))


def test_frames_of_a_caller(reader: FrameReader) -> None:
    images = frames(5)
    found = reader.of_images(images, {})
    assert (found.indices, found.fps) == ([0, 1, 2, 3, 4], 1.0)
    arrays = [np.asarray(each) for each in images]
    found = reader.of_images(arrays, {"fps": 4, "frames_indices": [0, 8, 16, 24, 32]})
    assert (found.indices, found.fps) == ([0, 8, 16, 24, 32], 4.0)
    found = reader.of_images(frames(50), {"fps": 10, "do_sample_frames": True})
    assert len(found.indices) == 8  # the limit
    files = [saved([each], "PNG") for each in images]
    np.testing.assert_array_equal(reader.of_images(files, {}).pixels[3], np.asarray(images[3]))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda r: r.of_images(frames(1), {}), "at least 2"),
        (lambda r: r.of_images(frames(9), {}), "--max-video-frames"),
        (lambda r: r.of_images([*frames(2), *frames(2, 41)], {}), "one size"),
        (lambda r: r.of_images(frames(8, 150, 100), {}), "--max-video-pixels"),
        (lambda r: r.of_images(frames(2), {"fps": 0.0, "frames_indices": [1]}), "1 indices"),
        (lambda r: r.of_images(frames(2), {"fps": -1}), "positive number"),
        (lambda r: r.of_images(frames(2), {"fps": math.nan}), "positive number"),
        (lambda r: r.of_images(frames(2), {"frames_indices": [0, math.nan]}), "be integers"),
        (lambda r: r.of_images(["x", "y"], {}), "str is no image"),
        (lambda r: r.of_file(b"nothing"), "no video"),
        (lambda r: r.of_file(saved(frames(1), "PNG")), "at least 2"),
        (lambda r: r.of_file(saved(frames(1), "JPEG")), "no video"),
        (lambda r: r.of_file(saved(frames(6), "GIF")[:3000]), "damaged|ends"),
        (lambda r: r.of_file(saved(frames(70, 160, 150), "GIF")), "are decoded"),
        (lambda r: r.of_file(saved(frames(2, 300, 200), "PNG")), "--max-image-pixels"),
    ],
)  # fmt: skip
def test_refusals(reader: FrameReader, call: Any, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        call(reader)


def growing_gif(*frames: tuple[int, int]) -> bytes:
    """Returns a GIF file of 1 x 1 pixels, whose frames are one pixel each at these places."""
    data = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    for place in frames:
        data += b"\x2c" + struct.pack("<HHHHB", *place, 1, 1, 0) + bytes([2, 2, 0x44, 1, 0])
    return data + b";"


def test_frames_that_grow(reader: FrameReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header's size is not that of later frames. They are refused before they are decoded."""
    assert len(reader.of_file(growing_gif((0, 0), (0, 0))).pixels) == 2
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(video_frames, "_duration", lambda frame: sizes.append(frame.size) or 100)
    with pytest.raises(ImageError, match="one size, but one has 9001 x 9000 pixels"):
        reader.of_file(growing_gif((0, 0), (9000, 8999), (9000, 8999)))
    assert sizes == [(1, 1)]


def test_many_tiny_frames(reader: FrameReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_frames, "_MOST_FRAMES", 10)
    with pytest.raises(ImageError, match="11 frames; a file may have at most 10") as error:
        reader.of_file(growing_gif(*[(0, 0)] * 11))
    assert error.value.code == "image_too_large"


def test_a_large_frame_is_not_decoded(reader: FrameReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_frames, "_duration", lambda frame: pytest.fail("a frame is decoded"))
    with pytest.raises(ImageError, match="--max-image-pixels"):
        reader.of_file(saved(frames(2, 300, 200), "PNG"))


MP4 = b"\0\0\0\x18ftypisom" + bytes(20)


def test_files_that_need_pyav(reader: FrameReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for data in (MP4, b"\x1aE\xdf\xa3" + bytes(20)):
        with pytest.raises(ImageError, match="PyAV"):
            reader.of_file(data)


class FakeFile:
    """A file of PyAV."""

    def __init__(self, images: list[Image.Image], count: int, decoded: list[int]) -> None:
        self._images = images
        self._decoded = decoded
        stream = SimpleNamespace(average_rate=5, width=40, height=30, frames=count)
        stream.codec_context = SimpleNamespace(options={})
        self.streams = SimpleNamespace(video=[stream])

    def __enter__(self) -> FakeFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def demux(self, stream: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(size=9) for _ in self._images] + [SimpleNamespace(size=0)]

    def decode(self, stream: Any) -> Any:
        assert stream.codec_context.options == {"max_pixels": str(LIMITS.image.max_pixels)}
        for index, image in enumerate(self._images):
            self._decoded.append(index)
            yield SimpleNamespace(
                width=image.width,
                height=image.height,
                to_ndarray=lambda format, image=image: np.asarray(image),
            )


def fake_av(monkeypatch: pytest.MonkeyPatch, images: list[Image.Image], count: int) -> list[int]:
    """Puts a module in PyAV's place. Returns a list, which gets the indices of decoded frames.

    Args:
        images: the frames of all files.
        count: the number of frames that the header says; 0 for none.
    """
    av, decoded = ModuleType("av"), list[int]()

    def open_file(stream: io.BytesIO, format: str) -> FakeFile:
        assert format == "mp4"
        return FakeFile(images, count, decoded)

    av.open = open_file  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "av", av)
    return decoded


@pytest.mark.parametrize("counted", [True, False])
def test_files_by_pyav(reader: FrameReader, monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    images = frames(20)
    fake_av(monkeypatch, images, len(images) if counted else 0)
    found = reader.of_file(MP4)
    assert (found.fps, found.indices) == (5.0, [0, 3, 5, 8, 11, 14, 16, 19])
    for index, pixels in zip(found.indices, found.pixels, strict=True):
        np.testing.assert_array_equal(pixels, np.asarray(images[index]))


def test_headers_that_lie(reader: FrameReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in a header bound what is decoded of a stream."""
    decoded = fake_av(monkeypatch, frames(50), 4)
    assert reader.of_file(MP4).indices == [0, 1, 2, 3]
    assert decoded == [0, 1, 2, 3]
    fake_av(monkeypatch, [*frames(3), *frames(3, 400, 300)], 6)
    with pytest.raises(ImageError, match="one size"):
        reader.of_file(MP4)
    fake_av(monkeypatch, frames(3), 6)
    with pytest.raises(ImageError, match="ends before"):
        reader.of_file(MP4)
