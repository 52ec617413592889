"""Collectives can be aborted without waiting, but leaving the group waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from quire.parallel import torch_group


class _Group:
    """A stand-in for a group that cannot end while `graphs` with its collectives exist."""

    def __init__(self, graphs: threading.Event) -> None:
        self._graphs = graphs
        self.ended = False

    def abort(self) -> None:
        self._graphs.wait()
        self.ended = True


def test_the_end_of_collectives_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, left = threading.Event(), []
    groups = [_Group(graphs), _Group(graphs)]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    world = SimpleNamespace(pg_map=dict.fromkeys(groups))
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)

    def leave() -> None:
        left.append([group.ended for group in groups])

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", leave)
    torch_group.abort_group()
    assert not any(group.ended for group in groups)
    leaving = threading.Thread(target=torch_group.leave_group, args=(True,), daemon=True)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    graphs.set()
    leaving.join(5.0)
    assert left == [[True, True]]
