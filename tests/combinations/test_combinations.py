"""Requests with many features give the same results as alone in an engine without features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.combinations.hunt import Plain, patch_costs, run
from tests.combinations.models import Checkpoints

SEEDS = range(100, 108)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with pytest.MonkeyPatch.context() as patch:
        patch_costs(patch)
        made = Plain(Checkpoints(tmp_path_factory.mktemp("checkpoints")))
        yield made
        made.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_requests_get_the_tokens_they_get_alone(plain: Plain, seed: int) -> None:
    pytest.importorskip("peft")
    run(seed, plain, Counter())
