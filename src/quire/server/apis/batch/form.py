"""Bodies of `multipart/form-data` (RFC 7578), read as they come."""

from __future__ import annotations

import logging
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from quire.server.errors import ApiError

MAX_PARTS = 16
MAX_FIELD = 4096
"""Most bytes of a field that is not the file."""
_MAX_HEAD = 8192
"""Most bytes of a part's headers."""
_MAX_HEADERS = 16

# The parser logs each malformed form, which any client can send.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary. Raises ApiError, 415, for another content type."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(415, "The body must be a form, sent as multipart/form-data.")
    if len(boundary) > 70 or not boundary.isascii():
        raise ApiError(400, "The form's boundary is not valid.", code="invalid_form")
    return boundary


class FormReader:
    """Reads a form. Writes its file to `target` and keeps its other fields.

    Attributes:
        fields: texts by name.
        filename: the file's name as the client gave it; None until the file begins.
        size: bytes of the file.
    """

    def __init__(self, boundary: bytes, target: BinaryIO, file_field: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._target = target
        self._file_field = file_field
        self._parts = 0
        self._name = ""
        self._value = bytearray()
        self._header_name = b""
        self._header_value = b""
        self._head_bytes = 0
        self._disposition = b""
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEAD,
        )

    def feed(self, data: bytes) -> None:
        """Reads the next bytes. Raises ApiError, 400, if they are not of a form or too many."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from None

    def close(self) -> None:
        """Raises ApiError, 400, unless the form has ended and had a file."""
        if not self._ended:
            raise _invalid("it ends in the middle")
        if self.filename is None:
            raise ApiError(
                400,
                f"Missing required parameter: '{self._file_field}'.",
                param=self._file_field,
                code="missing_required_parameter",
            )

    # Callbacks of the parser, in the order in which it calls them for each part.

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        self._head_bytes = 0
        self._disposition = b""

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += self._of_head(data[start:end])

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += self._of_head(data[start:end])

    def _of_head(self, data: bytes) -> bytes:
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD:
            raise _invalid("the head of a part is too large")
        return data

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _end_head(self) -> None:
        # Clients send names in UTF-8 (RFC 7578, 5.1).
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise _invalid("a part has no name")
        if name in self.fields or (name == self._file_field and self.filename is not None):
            raise _invalid(f"the field '{name[:100]}' comes twice")
        if name == self._file_field:
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "file"
        self._name, self._value = name, bytearray()

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == self._file_field:
            self._target.write(data[start:end])
            self.size += end - start
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD:
            raise _invalid(f"the field '{self._name[:100]}' has more than {MAX_FIELD} bytes")

    def _end_part(self) -> None:
        if self._name != self._file_field:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise _invalid(f"the field '{self._name[:100]}' is not UTF-8") from None

    def _end(self) -> None:
        self._ended = True


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"The form is not valid: {why}.", code="invalid_form")
