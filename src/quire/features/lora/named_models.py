"""Adapters as models of the API: requests choose one by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quire.features.call import Callers, RequestField
from quire.features.lora.calls import ADAPTER, adapter_names
from quire.features.lora.registry import folder_of, names_in


class AdapterModels:
    """The adapters that the engines have loaded, and those in the folder `lora_dir`."""

    def __init__(self, client: Callers) -> None:
        self._client = client

    def names(self) -> Collection[str]:
        return {*adapter_names(self._client), *names_in(self._folder)}

    def fields(self, name: str) -> Mapping[RequestField[Any], Any] | None:
        if name in adapter_names(self._client) or folder_of(self._folder, name) is not None:
            return {ADAPTER: name}
        return None

    @property
    def _folder(self) -> Path | None:
        folder: str | None = self._client.config.args.lora_dir
        return None if folder is None else Path(folder)
