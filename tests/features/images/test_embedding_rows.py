"""Rows for embeddings: who keeps them, and who gives them up."""

from __future__ import annotations

from quire import SamplingParams
from quire.arrays import int32
from quire.features.images.embedding_rows import EmbeddingRows
from quire.request import Request, RequestStatus


def request(name: str, status: RequestStatus) -> Request:
    made = Request(name, int32([1]), SamplingParams(), max_total=2)
    made.status = status
    return made


RUNNING = request("running", RequestStatus.RUNNING)
WAITING = request("waiting", RequestStatus.WAITING)
OTHER = request("other", RequestStatus.WAITING)


def test_the_image_used_longest_ago_goes_first() -> None:
    rows = EmbeddingRows(30)
    for key in (b"a", b"b", b"c"):
        booked = rows.book(key, 10, RUNNING)
        assert booked is not None
        booked.users.clear()
    rows.find(b"a")
    assert rows.book(b"d", 10, RUNNING) is not None
    assert [rows.find(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert rows.used == 30


def test_rows_of_an_image_lie_together() -> None:
    rows = EmbeddingRows(30)
    for key in (b"a", b"b", b"c"):
        assert rows.book(key, 10, RUNNING) is not None
    for key in (b"a", b"c"):
        found = rows.find(key)
        assert found is not None
        rows.drop(found)
    assert rows.book(b"d", 20, RUNNING) is None
    booked = rows.book(b"d", 10, RUNNING)
    assert booked is not None
    assert booked.first == 0


def test_running_requests_keep_rows_and_others_give_them_up() -> None:
    rows = EmbeddingRows(20)
    assert rows.book(b"a", 10, WAITING) is not None
    assert rows.book(b"b", 20, WAITING) is None  # its own rows stay
    assert rows.find(b"a") is not None
    assert rows.book(b"b", 20, OTHER) is not None
    assert rows.find(b"a") is None
    assert rows.book(b"c", 20, RUNNING) is not None
    assert rows.book(b"d", 5, WAITING) is None
    rows.clear()
    assert rows.used == 20
