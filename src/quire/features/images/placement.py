"""Places of images among a prompt's tokens, and their ids in the KV cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from quire.arrays import Int32, int32
from quire.features.call import LoadedPart, PromptInputs, RequestField
from quire.features.images.fields import CACHE_IDS, ITEMS, PlacedImage
from quire.features.images.processor import ImageGrid
from quire.features.images.shared_pixels import SharedPixels

_MOST_ID = 2**31


def image_ids(digest: bytes, count: int, vocab_size: int) -> Int32:
    """Returns the ids of an image's positions, int32 [count], all of them >= `vocab_size`.

    The ids hash the digest, so the prefix tree shares the KV of equal images only.
    """
    words = np.frombuffer(hashlib.shake_128(digest).digest(4 * count), dtype=np.uint32)
    return int32(vocab_size + words % np.uint32(_MOST_ID - vocab_size))


@dataclass(frozen=True, slots=True)
class LoadedImage(LoadedPart):
    """An image whose pixels are in shared memory.

    Attributes:
        param: the request's field that has it.
    """

    pixels: SharedPixels
    grid: ImageGrid
    digest: bytes
    param: str

    def close(self) -> None:
        self.pixels.close()


@dataclass(frozen=True, slots=True)
class LoadedVideo(LoadedPart):
    """A video whose frames are in shared memory.

    Attributes:
        groups: groups of neighbouring frames.
        times: the text before each group.
        param: the request's field that has it.
    """

    groups: Sequence[LoadedImage]
    times: Sequence[str]
    param: str

    def close(self) -> None:
        for group in self.groups:
            group.close()


@dataclass(frozen=True, slots=True)
class ImageInputs(PromptInputs):
    """The images of a prompt.

    Attributes:
        images: in the order of their places.
        starts: position of each image's first token.
        ids: the ids of each image's positions in the KV cache.
    """

    images: Sequence[LoadedImage]
    starts: Sequence[int]
    ids: Sequence[Int32]

    def cache_ids(self, ids: Int32) -> Int32:
        known = int32(ids).copy()
        for start, own in zip(self.starts, self.ids, strict=True):
            known[start : start + len(own)] = own
        return known

    def fields(self, ids: Int32) -> Mapping[RequestField[Any], Any]:
        items = [
            PlacedImage(
                start=start,
                tokens=image.grid.tokens,
                digest=image.digest,
                grid=(image.grid.frames, image.grid.h, image.grid.w, image.grid.merge),
                size=image.pixels.size,
                memory=image.pixels.place,
            )
            for image, start in zip(self.images, self.starts, strict=True)
        ]
        return {ITEMS: items, CACHE_IDS: self.cache_ids(ids)}

    def shifted(self, count: int) -> ImageInputs:
        return replace(self, starts=[start + count for start in self.starts])


def place_images(
    ids: Int32, images: Sequence[LoadedImage], token_ids: Sequence[int], vocab_size: int
) -> tuple[Int32, ImageInputs] | None:
    """Repeats the token of each image as often as the image has positions.

    Returns the prompt and its images. None: the number of such tokens is not that of the images.

    Args:
        ids: int32 [n].
        token_ids: the tokens that stand for an image.
    """
    found = np.flatnonzero(np.isin(ids, token_ids))
    if len(found) != len(images):
        return None
    counts = np.ones(len(ids), dtype=np.int64)
    counts[found] = [image.grid.tokens for image in images]
    starts = np.cumsum(counts) - counts
    own = [image_ids(image.digest, image.grid.tokens, vocab_size) for image in images]
    return int32(np.repeat(ids, counts)), ImageInputs(images, starts[found].tolist(), own)


class VideoTokens(NamedTuple):
    """The tokens of videos.

    Attributes:
        token_id: stands for a video, and for each of its groups.
        begin: stands before each group.
        end: stands behind each group.
    """

    token_id: int
    begin: int
    end: int


def expand_videos(ids: Int32, texts: Sequence[Sequence[Int32]], tokens: VideoTokens) -> Int32:
    """Puts the groups of each video in the place of the video's token.

    The marks around the token, which chat templates write, are replaced too. Each group gets its
    time, and marks of its own.

    Args:
        ids: int32 [n], with a token for each video.
        texts: for each video, the tokens of the text before each group.
    """
    pieces: list[Int32] = []
    done = 0
    mark = int32([tokens.begin, tokens.token_id, tokens.end])
    for place, groups in zip(np.flatnonzero(ids == tokens.token_id).tolist(), texts, strict=True):
        marked = place > done and np.array_equal(ids[place - 1 : place + 2], mark)
        pieces.append(ids[done : place - marked])
        for text in groups:
            pieces += [text, mark]
        done = place + 1 + marked
    return int32(np.concatenate([*pieces, ids[done:]]))
