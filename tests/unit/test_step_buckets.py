"""How steps are padded to graphs, and what fills one."""

import bisect
from collections.abc import Callable

import pytest

from quire.runner.cuda_graphs import full_step, mixed_buckets


@pytest.mark.parametrize("most", [8, 100, 512, 700, 2048, 8192])
def test_mixed_buckets_hold_every_step_with_little_padding(most: int) -> None:
    sizes = mixed_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for tokens in range(2, most + 1):
        held = sizes[bisect.bisect_left(sizes, tokens)]
        assert held < 1.5 * tokens or tokens <= 128
        assert held < 1.25 * tokens or tokens <= 512
        assert held < 1.125 * tokens or not 1024 < tokens <= 2048


@pytest.mark.parametrize(
    ("fixed", "most", "full"),
    [
        (0.0, 8192, 512),  # a large model: all of the time goes with the tokens
        (1000.0, 8192, 1024),  # as much again per step, however few there are
        (1500.0, 8192, 2048),
        (1e9, 8192, 8192),
        (1e9, 3000, 2048),  # no step of twice as many
        (1e9, 300, 300),
    ],
)
def test_full_step_is_where_waiting_pays(fixed: float, most: int, full: int) -> None:
    seconds: Callable[[int], float] = lambda tokens: fixed + tokens  # noqa: E731
    assert full_step(seconds, most) == full
