"""Books rows of the device's table for the embeddings of images."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from quire.request import Request, RequestStatus


@dataclass(slots=True)
class ImageRows:
    """The rows of one image.

    Attributes:
        key: identifies the image.
        first: its first row.
        count: number of its rows, which lie one after the other.
        encoded: whether a plan has filled the rows.
        users: the requests whose next steps read the rows, by id.
    """

    key: bytes
    first: int
    count: int
    encoded: bool = False
    users: dict[str, Request] = field(default_factory=dict)

    @property
    def in_use(self) -> bool:
        # A waiting request may give its rows up. Otherwise it could wait for blocks of a running
        # request that waits for rows.
        return any(user.status is RequestStatus.RUNNING for user in self.users.values())


class EmbeddingRows:
    """Books rows for images. If there are too few, it drops the images used longest ago.

    Attributes:
        size: number of rows.
        used: number of rows that images have.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._images: OrderedDict[bytes, ImageRows] = OrderedDict()

    def find(self, key: bytes) -> ImageRows | None:
        found = self._images.get(key)
        if found is not None:
            self._images.move_to_end(key)
        return found

    def book(self, key: bytes, count: int) -> ImageRows | None:
        """Returns rows for an image that has none, or None if requests use too many of them."""
        first = self._gap(count)
        for image in [each for each in self._images.values() if not each.in_use]:
            if first is not None:
                break
            self.drop(image)
            first = self._gap(count)
        if first is None:
            return None
        self.used += count
        booked = self._images[key] = ImageRows(key, first, count)
        return booked

    def drop(self, image: ImageRows) -> None:
        del self._images[image.key]
        self.used -= image.count

    def _gap(self, count: int) -> int | None:
        """Returns the first of `count` free rows."""
        end = 0
        for image in sorted(self._images.values(), key=lambda each: each.first):
            if image.first - end >= count:
                return end
            end = image.first + image.count
        return end if self.size - end >= count else None

    def clear(self) -> None:
        """Drops all images that no running request uses."""
        for image in [each for each in self._images.values() if not each.users]:
            self.drop(image)
