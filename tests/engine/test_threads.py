"""The engine's process gets threads that sleep while they wait, unless the user says otherwise."""

from __future__ import annotations

import pytest

from quire.engine.processes import thread_variables


def test_threads_do_not_spin() -> None:
    assert thread_variables({}) == {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    assert thread_variables({"OMP_NUM_THREADS": "4"})["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_thread_counts_set_by_the_user_stay(name: str) -> None:
    assert thread_variables({name: "1"}) == {}
