"""Bodies of `multipart/form-data` (RFC 7578), read as they come."""

from __future__ import annotations

from email import message_from_string
from email.message import Message
from typing import BinaryIO

from quire.server.errors import ApiError

MAX_PARTS = 16
MAX_FIELD = 4096
"""Most bytes of a field that is no file."""
_MAX_HEAD = 8192
_MAX_PADDING = 256


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary. Raises ApiError, 415, for another content type."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError(415, "The body must be a form, sent as multipart/form-data.")
    if len(boundary) > 70 or not boundary.isascii():
        raise ApiError(400, "The form's boundary is not valid.", code="invalid_form")
    return boundary.encode()


class FormReader:
    """Reads a form: its file goes to `target`, its other fields are kept.

    Attributes:
        fields: texts by name.
        filename: the file's name as the client gave it; None: no file has come.
        size: bytes of the file.
    """

    def __init__(self, boundary: bytes, target: BinaryIO, file_field: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._target = target
        self._file_field = file_field
        self._delimiter = b"\r\n--" + boundary
        self._data = b"\r\n"  # the first delimiter may lack its line break
        self._read = self._skip
        self._parts = 0
        self._name = ""
        self._value = bytearray()
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Takes in the next bytes. Raises ApiError, 400, for what is no form, or too large."""
        self._data += data
        while self._read():
            pass

    def close(self) -> None:
        """Raises ApiError, 400, unless the form has come to its end and had a file."""
        if not self._ended:
            raise _invalid("it ends in the middle")
        if self.filename is None:
            raise ApiError(
                400,
                f"Missing required parameter: '{self._file_field}'.",
                param=self._file_field,
                code="missing_required_parameter",
            )

    # Each state reads what it can and tells whether the next may go on.

    def _skip(self) -> bool:
        """Skips what stands before the first delimiter."""
        return self._until_delimiter() is not None

    def _body(self) -> bool:
        part = self._until_delimiter()
        if part is None:
            return False
        if self._name != self._file_field:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise _invalid(f"the field '{self._name[:100]}' is not UTF-8") from None
        return True

    def _until_delimiter(self) -> bool | None:
        """Hands on what stands before the next delimiter; None: it has not come."""
        place = self._data.find(self._delimiter)
        if place < 0:
            keep = len(self._delimiter) - 1
            self._take(self._data[:-keep])
            self._data = self._data[-keep:]
            return None
        self._take(self._data[:place])
        self._data = self._data[place + len(self._delimiter) :]
        self._read = self._after_delimiter
        return True

    def _take(self, data: bytes) -> None:
        if self._parts == 0:
            return
        if self._name == self._file_field:
            self._target.write(data)
            self.size += len(data)
            return
        self._value += data
        if len(self._value) > MAX_FIELD:
            raise _invalid(f"the field '{self._name[:100]}' has more than {MAX_FIELD} bytes")

    def _after_delimiter(self) -> bool:
        if len(self._data) < 2:
            return False
        if self._data.startswith(b"--"):
            self._ended, self._read, self._data = True, self._drop, b""
            return False
        place = self._data.find(b"\r\n")
        if place > _MAX_PADDING or (place < 0 and len(self._data) > _MAX_PADDING):
            raise _invalid("a delimiter is followed by something else")
        if place < 0:
            return False
        if self._data[:place].strip(b" \t"):
            raise _invalid("a delimiter is followed by something else")
        self._data, self._read = self._data[place:], self._head
        return True

    def _head(self) -> bool:
        place = self._data.find(b"\r\n\r\n")
        if place > _MAX_HEAD or (place < 0 and len(self._data) > _MAX_HEAD):
            raise _invalid("the head of a part is too large")
        if place < 0:
            return False
        # Clients send names in UTF-8 (RFC 7578, 5.1), which headers of mails do not allow.
        head = message_from_string(self._data[2:place].decode("utf-8", "replace"))
        name = head.get_param("name", header="content-disposition")
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        if not isinstance(name, str) or not name:
            raise _invalid("a part has no name")
        if name in self.fields or (name == self._file_field and self.filename is not None):
            raise _invalid(f"the field '{name[:100]}' comes twice")
        if name == self._file_field:
            self.filename = head.get_filename() or "file"
        self._name, self._value = name, bytearray()
        self._data, self._read = self._data[place + 4 :], self._body
        return True

    def _drop(self) -> bool:
        self._data = b""
        return False


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"The form is not valid: {why}.", code="invalid_form")
