"""The bytes of an image, from the forms in which requests have them."""

from __future__ import annotations

import base64
import binascii
import re

from quire.errors import RequestError

_DATA_URI = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?((?:;[a-z0-9-]+=[^;,]*)*)(;base64)?,", re.I)


def refused(param: str, why: str, code: str = "invalid_image") -> RequestError:
    """Returns the error of a field whose image cannot be used."""
    return RequestError(f"Invalid value for '{param}': {why}", param, code)


def decode_base64(text: str, most: int, param: str, flag: str = "--max-image-bytes") -> bytes:
    """Returns the bytes of a base64 text.

    Args:
        most: most bytes.
        flag: sets them.
    """
    if len(text) > (most + 2) // 3 * 4 + 4 and len(text) * 3 // 4 > most:
        raise too_large(len(text) * 3 // 4, most, param, flag)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise refused(param, "it is not valid base64.") from None


def too_large(size: int, most: int, param: str, flag: str = "--max-image-bytes") -> RequestError:
    return refused(
        param,
        f"it has {size} bytes; at most {most} are allowed ({flag}).",
        "image_too_large",
    )


def is_data_uri(url: str) -> bool:
    return url[:5].lower() == "data:"


def is_address(url: str) -> bool:
    """Whether a text is an address, and neither a data URI nor base64."""
    return "://" in url[:16]


def decode_data_uri(url: str, most: int, param: str) -> tuple[bytes, str | None]:
    """Returns the bytes of a data URI in base64, and the type that it declares."""
    found = _DATA_URI.match(url)
    if found is None or found[3] is None:
        raise refused(param, "a data URI begins like 'data:image/png;base64,'.")
    return decode_base64(url[found.end() :], most, param), found[1]


def decode_frames(
    url: str, most: int, most_frames: int, param: str
) -> tuple[list[bytes], str | None]:
    """Returns the files of a video's data URI, and the type that it declares.

    A URI of type video/jpeg holds an image for each frame, with commas between them. Others hold
    one file.

    Args:
        most: most bytes of all files.
        most_frames: most files.
    """
    found = _DATA_URI.match(url)
    if found is None or found[3] is None:
        raise refused(param, "a data URI begins like 'data:video/mp4;base64,'.")
    kind = found[1].lower() if found[1] else None
    if len(url) * 3 // 4 > most + len(url[: found.end()]) + 4:
        raise too_large(len(url) * 3 // 4, most, param, "--max-video-bytes")
    if kind != "video/jpeg":
        return [decode_base64(url[found.end() :], most, param, "--max-video-bytes")], kind
    count = url.count(",", found.end()) + 1
    if count > most_frames:
        raise refused(
            param,
            f"the video has {count} frames; at most {most_frames} are allowed "
            "(--max-video-frames).",
            "image_too_large",
        )
    texts = url[found.end() :].split(",")
    return [decode_base64(text, most, param, "--max-video-bytes") for text in texts], kind
