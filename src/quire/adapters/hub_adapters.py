"""Adapters of the Hugging Face hub, fetched to a folder of this machine."""

from __future__ import annotations

from concurrent.futures import Future

from quire.adapters import background
from quire.errors import ModelError, RequestError
from quire.models.config import is_hub_id


def on_the_hub(path: str) -> bool:
    """Whether an adapter's path names no folder of this machine, and may be one of the hub."""
    return path.count("/") == 1 and is_hub_id(path)


def fetch_now(hub_id: str) -> str:
    """Returns the folder of an adapter of the hub. Raises RequestError if it cannot be had."""
    # The hub's client is slow to import.
    from quire.models.hub import download_adapter

    try:
        return str(download_adapter(hub_id))
    except ModelError as error:
        raise RequestError(str(error), "lora_path", "invalid_adapter") from None


def fetch(hub_id: str) -> Future[str]:
    """Does what `fetch_now` does, on a thread of its own, which the process's end does not wait
    for."""
    return background.start("adapter-fetch", lambda: fetch_now(hub_id))
