"""Reads query parameters as strictly as bodies."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request

from quire.server.errors import ApiError
from quire.server.http.strict_model import INT32_MAX

T = TypeVar("T")

PAGING = ("after", "limit", "order")
"""The parameters that `page_of` reads."""


class Query:
    """A request's query parameters.

    Args:
        names: the parameters that the route has.
        many: those of them that may be repeated.

    Raises:
        ApiError: 400, a parameter is unknown, repeated or of the wrong type.
    """

    def __init__(self, request: Request, *names: str, many: tuple[str, ...] = ()) -> None:
        self._values: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            if name not in names:
                raise ApiError(
                    400,
                    f"Unknown parameter: '{name[:100]}'.",
                    param=name[:100],
                    code="unknown_parameter",
                )
            if name in self._values and name in many:
                value = f"{self._values[name]},{value}"
            elif name in self._values:
                raise _invalid(name, "it is given twice")
            self._values[name] = value

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def list(self, name: str) -> list[str] | None:
        """Returns the values of a parameter, which commas separate; None: it is not given."""
        value = self._values.get(name)
        return None if value is None else [part for part in value.split(",") if part]

    def flag(self, name: str) -> bool:
        return self.choice(name, ("false", "true")) == "true"

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Returns one of `allowed`; the first is the default."""
        value = self._values.get(name, allowed[0])
        if value not in allowed:
            raise _invalid(name, f"it must be one of {', '.join(allowed)}")
        return value

    def integer(self, name: str, default: int, low: int, high: int = INT32_MAX) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10):
            raise _invalid(name, "it must be an integer")
        if not low <= int(value) <= high:
            raise _invalid(name, f"it must be in [{low}, {high}]")
        return int(value)


class Page(msgspec.Struct, Generic[T]):
    """A page of a list, as the APIs send it.

    Attributes:
        first_id: id of the first item; None if there are no items.
        last_id: id of the last item.
        has_more: whether items follow the last one.
    """

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page_of(
    query: Query,
    items: list[T],
    ids: list[str],
    *,
    order: tuple[str, str] = ("asc", "desc"),
    limit: int = 20,
    most: int = 100,
) -> Page[T]:
    """Returns the page that `after`, `limit` and `order` select.

    Args:
        items: all items, oldest first.
        ids: their ids, in the same order.
        order: the two orders, the default first.
        limit: default of the parameter `limit`.
        most: largest allowed `limit`.
    """
    if query.choice("order", order) == "desc":
        items, ids = items[::-1], ids[::-1]
    after = query.text("after")
    if after is not None:
        if after not in ids:
            raise ApiError(400, f"'after': there is no '{after[:200]}'.", param="after")
        place = ids.index(after) + 1
        items, ids = items[place:], ids[place:]
    count = query.integer("limit", limit, 1, most)
    shown = ids[:count]
    first, last = (shown[0], shown[-1]) if shown else (None, None)
    return Page(items[:count], first, last, len(items) > count)


def _invalid(name: str, reason: str) -> ApiError:
    return ApiError(400, f"Invalid value for '{name}': {reason}.", param=name, code="invalid_value")
