"""Formats log lines as text or as JSON objects."""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from quire.server.args import ServerArgs

_FIRST = ("method", "path")
"""Fields that the message of an access line already contains."""


def configure(args: ServerArgs) -> None:
    """Sets up the root logger of this process, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if args.log_json else TextFormatter())
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))
    # Access lines have flags of their own, so they do not depend on --log-level.
    enabled = args.access_log or args.log_prompts
    logging.getLogger("quire.access").setLevel(logging.INFO if enabled else logging.CRITICAL)


class TextFormatter(logging.Formatter):
    """Formats records as text, with an access line's fields as `name=value`.

    Texts from clients are quoted.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base's name)
        line = super().formatMessage(record)
        fields = _fields(record)
        return line + "".join(f" {n}={_text(v)}" for n, v in fields.items() if n not in _FIRST)


class JsonFormatter(logging.Formatter):
    """Formats records as JSON: time, level, logger, message, and an access line's fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return msgspec.json.encode(entry).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return repr(value) if isinstance(value, list) else str(value) or "-"
