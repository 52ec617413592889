"""Reads of other engines' memory by NIXL."""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError, QuireError, require_nixl
from quire.runner.transfer.engine_memory import MemoryKind, MemoryPieces
from quire.runner.transfer.remote_reads import ReadPart, RemoteReads

_BACKEND = "UCX"


class NixlAgent(RemoteReads):
    """The library's agent of this rank.

    Raises:
        ConfigError: the library is not installed, or cannot be used with this memory.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        name = require_nixl()
        super().__init__(tensors, device, "kv-nixl")
        try:
            nixl = importlib.import_module(name)
            logging.getLogger("nixl").setLevel(logging.WARNING)
            settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = nixl.nixl_agent(secrets.token_hex(8), settings)
            regions = [(t.data_ptr(), t.nbytes, self.device, "") for t in tensors if t.nbytes]
            self._agent.register_memory(regions, self.kind, backends=[_BACKEND])
            self.metadata = self._agent.get_agent_metadata()
        except Exception as error:  # The library's errors have no common base.
            raise ConfigError(
                f"transport=nixl: {name} cannot be used here ({type(error).__name__}: {error})",
                "transport",
            ) from error
        self._start_thread()

    def _connect(self, metadata: bytes) -> str:
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def _disconnect(self, peer: str) -> None:
        self._agent.remove_remote_agent(peer)

    def _begin(self, peer: str, part: ReadPart, pieces: MemoryPieces) -> Any:
        local = self._list(pieces.local, pieces.sizes, self.kind, self.device)
        remote = self._list(pieces.remote, pieces.sizes, part.rank.kind, part.rank.device)
        # The part gets the handle before anything can fail, so that it is released.
        part.handle = self._agent.initialize_xfer(
            "READ", local, remote, peer, b"", backends=[_BACKEND]
        )
        self._agent.transfer(part.handle)
        return part.handle

    def _done(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state not in ("PROC", "DONE"):
            raise QuireError(f"the read ended as {state}")
        return bool(state == "DONE")

    def _release(self, handle: Any) -> None:
        handle.release()

    def _serve(self) -> None:
        # If the network cannot read by itself, this call answers the peer's read.
        self._agent.get_new_notifs(backends=[_BACKEND])

    def _shut(self) -> None:
        self._agent = None

    def _list(self, addresses: Any, sizes: Any, kind: MemoryKind, device: int) -> Any:
        rows = np.stack([addresses, sizes, np.full(len(sizes), device, dtype=np.int64)], axis=1)
        return self._agent.get_xfer_descs(rows.astype(np.uint64), kind)
