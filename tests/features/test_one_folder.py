"""A feature from another package, in one folder, in real servers without a patch.

The folder `constant_token/` adds a call, a request field, statistics, a metric, a column of the
batch and a hook in the head. The servers find it by its entry point, in a package's metadata.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.engine.process.client import EngineClient
from quire.errors import RequestError
from tests.features.constant_token.calls import NONE, SET_DEFAULT, TOKEN
from tests.server.server_process import MODEL, Server, start_server
from tests.server.test_faults import child
from tests.slow import slow

ROOT = Path(__file__).parents[2]
METADATA = "Metadata-Version: 2.1\nName: constant-token\nVersion: 1.0\n"
ENTRY = "[quire.features]\nconstant_token = tests.features.constant_token:FEATURE\n"
ENGINE = "quire.engine.process.process"
TOKENS = 5
LETTERS = (70, 90)
"""Two tokens that have a text, and that end no completion."""


@pytest.fixture(params=[slow(()), ("--api-workers", "2", "--tensor-parallel-size", "2")])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    metadata = tmp_path / "constant_token-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY)
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = start_server(
        *request.param, variables={"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    )
    yield found
    found.stop(signal.SIGKILL)


def test_a_feature_of_another_package(server: Server) -> None:
    asyncio.run(_use(server))
    assert server.metric("quire_constant_token_completions_total") == 4
    assert server.stop() == 0


async def _use(server: Server) -> None:
    client = await EngineClient.attach(_address(server))
    try:
        plain = _complete(server)
        field = [await _generate(client, token) for token in LETTERS]
        assert [ids for ids, _ in field] == [[token] * TOKENS for token in LETTERS]
        with pytest.raises(RequestError, match="token 123456789 is not in the vocabulary"):
            await _generate(client, 123456789)

        assert _complete(server) == plain  # a lane does not keep the token of its last request
        before = NONE
        for token, (_, text) in zip(LETTERS, field, strict=True):
            assert await client.call(SET_DEFAULT, token) == before
            assert _complete(server) == text
            before = token
        with pytest.raises(RequestError, match="token -2 is not in the vocabulary"):
            await client.call(SET_DEFAULT, -2)
        assert await client.call(SET_DEFAULT, NONE) == LETTERS[-1]
        assert _complete(server) == plain
    finally:
        await client.shutdown()


async def _generate(client: EngineClient, token: int) -> tuple[list[int], str]:
    """Returns the tokens and the text of a request that carries the field."""
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=3)
    ids, text = list[int](), ""
    updates = client.generate("Once", params, request_id=f"one-{token}", fields={TOKEN: token})
    async for update in updates:
        ids += update.token_ids
        text += update.text
    return ids, text


def _complete(server: Server) -> str:
    """Returns the text of a request over HTTP."""
    with server.client() as client:
        made = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=TOKENS, temperature=0.0
        )
    return made.choices[0].text


def _address(server: Server) -> str:
    """Returns the socket of the server's engine, from the command line of its process."""
    words = Path(f"/proc/{child(server, ENGINE)}/cmdline").read_bytes().decode().split("\0")
    return words[words.index(ENGINE) + 1]
