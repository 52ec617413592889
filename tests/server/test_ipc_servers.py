"""Two real servers on GPUs whose engines read each other's KV cache by CUDA's handles: on two GPUs
where there are two, else on one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.server import test_nixl as shared
from tests.server.server_process import Server, start_server
from tests.server.test_disagg import KEY, LEASE
from tests.server.test_disagg import start_reader as start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WAY = ("--transport", "ipc", "--device", "cuda", "--deterministic")
STEPS = ("--max-num-batched-tokens", "64", "--kv-transfer", "async")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    others = ",".join(map(str, reversed(range(torch.cuda.device_count()))))
    writer = start_server(
        *("--role", "prefill", "--api-key", KEY, *WAY, *STEPS, *LEASE),
        variables={"CUDA_VISIBLE_DEVICES": others},
    )
    reader = start(writer, *WAY)
    yield writer, reader
    for server in (reader, writer):
        server.stop(signal.SIGKILL)


# In this order, because the second test leaves error counts.
test_prompts_are_read_from_the_peers_cache = shared.test_prompts_are_read_from_the_peers_cache
test_a_writer_that_dies_and_comes_back = shared.test_a_writer_that_dies_and_comes_back
