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
        dropped: whether the rows are no longer the image's.
        users: the requests whose next steps read the rows, by id.
    """

    key: bytes
    first: int
    count: int
    encoded: bool = False
    dropped: bool = False
    users: dict[str, Request] = field(default_factory=dict)

    def needed(self, request: Request) -> bool:
        """Whether the rows must stay while `request` books others.

        Other waiting requests give their rows up. Otherwise they could wait for blocks of a running
        request that waits for rows.
        """
        return request.request_id in self.users or any(
            user.status is RequestStatus.RUNNING for user in self.users.values()
        )


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

    def book(self, key: bytes, count: int, request: Request) -> ImageRows | None:
        """Returns rows for a request's image that has none, or None if too many are needed."""
        first = self._gap(count)
        for image in [each for each in self._images.values() if not each.needed(request)]:
            if first is not None:
                break
            self.drop(image)
            first = self._gap(count)
        if first is None:
            return None
        self.used += count
        booked = self._images[key] = ImageRows(
            key, first, count, users={request.request_id: request}
        )
        return booked

    def drop(self, image: ImageRows) -> None:
        image.dropped = True
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
