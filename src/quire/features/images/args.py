"""The settings for images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from quire.config import COUNT, POSITIVE, CoreArgs, FeatureArgs, setting
from quire.errors import ConfigError

_image_setting = partial(setting, subject="Images")

MOST_IMAGES = 1024
"""Most images that a request may have: the batch state has four words for each, in each lane."""


@dataclass(frozen=True, kw_only=True)
class ImageArgs(FeatureArgs):
    """The settings for images: what requests may send, and the memory for it."""

    language_model_only: bool = _image_setting(
        False, "Serve the text half of a model that sees images; skip its vision weights."
    )
    max_images: int = _image_setting(32, "Most images of a request.", limit=COUNT)
    max_image_bytes: int = _image_setting(20 << 20, "Most bytes of an image's file.", limit=COUNT)
    max_image_pixels: int = _image_setting(
        64 << 20, "Most pixels of an image, width times height.", limit=COUNT
    )
    max_videos: int = _image_setting(4, "Most videos of a request.", limit=COUNT)
    max_video_frames: int = _image_setting(
        64,
        "Most frames of a video that the model sees; two count as one image.",
        limit=COUNT,
    )
    max_video_bytes: int = _image_setting(64 << 20, "Most bytes of a video's file.", limit=COUNT)
    max_video_pixels: int = _image_setting(
        256 << 20, "Most pixels of all frames of a video that the model sees.", limit=COUNT
    )
    allow_image_hosts: tuple[str, ...] = _image_setting(
        (),
        "Host whose images requests may name by URL (may be repeated); *.example.com allows all "
        "hosts below. Default: none, images come in requests.",
    )
    image_fetch_seconds: float = _image_setting(
        10.0, "Seconds that the download of an image may take.", limit=POSITIVE
    )
    image_cache_gb: float = _image_setting(
        1.0, "Memory of each device, in GB, for embeddings of images.", limit=POSITIVE
    )
    image_step_tokens: int = _image_setting(
        2048,
        "Most positions of images that a step encodes; a step encodes at least one image.",
        limit=COUNT,
    )
    image_step_ms: float = _image_setting(
        2.0,
        "Most milliseconds of encoding in a step in which streams decode; a step encodes at least "
        "one layer of an image.",
        limit=POSITIVE,
    )

    def check(self, args: CoreArgs) -> None:
        if self.max_images > MOST_IMAGES:
            raise ConfigError(
                f"max_images is at most {MOST_IMAGES}, got {self.max_images}", "max_images"
            )
        for host in self.allow_image_hosts:
            name = host.removeprefix("*.")
            if not name or not name.isascii() or set(name) & set("*/:@ "):
                raise ConfigError(
                    f"allow_image_hosts: {host!r} is no host's name; write example.com or "
                    "*.example.com",
                    "allow_image_hosts",
                )
