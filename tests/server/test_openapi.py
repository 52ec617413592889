"""`/openapi.json`, and the routes held to it."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings

from quire.config import EngineArgs, EngineConfig, SchedulerConfig
from quire.engine.loop.stats import EngineStats
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.openapi import ROUTES, document
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import connect, run
from tests.slow import WHOLE, examples

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import checks  # noqa: E402
from schemathesis.generation.feedback import FeedbackSources  # noqa: E402
from schemathesis.generation.hypothesis.builder import (  # noqa: E402
    InvalidHeadersExampleMark,
    MissingPathParameters,
)
from schemathesis.generation.meta import TestPhase  # noqa: E402
from schemathesis.pytest._test_builder import build_operation_test  # noqa: E402
from schemathesis.python._constants.orchestrator import (  # noqa: E402
    make_constants_value_source,
)

CONFIG = EngineConfig(
    args=EngineArgs(model="fake"),
    model_path="/nowhere",
    tokenizer_path=None,
    model_name="fake",
    device="cpu",
    dtype="float32",
    block_size=16,
    scheduler=SchedulerConfig(max_model_len=64),
    eos_token_ids=(2,),
    vocab_size=32000,
)


class _Engine(FakeClient):
    """An engine with statistics and a prefix cache."""

    host: ClassVar[Any] = object()
    responsive = True

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def reset_prefix_cache(self) -> bool:
        return True

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        self.asleep = False


APP = build_app(
    _Engine(tokenizer=PlainTokenizer(), config=CONFIG),  # type: ignore[arg-type]
    ServerArgs(generation_config="none", allowed_hosts=("testserver",), ollama_api=0),
)
# Excluded are the live view and the events, which never end, and sleep, which would make all others
# fail. These have other tests.
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP).exclude(
    path=["/engine/live", "/kv/events", "/sleep"]
)


def test_every_route_is_described() -> None:
    served = {
        (method.lower(), route.path.replace(":path", ""))  # type: ignore[attr-defined]
        for route in APP.routes
        for method in getattr(route, "methods", None) or ()  # a WebSocket has none
        if method != "HEAD" and not route.path.startswith("/playground/")  # type: ignore[attr-defined]
    }
    assert served == {(route.method, route.described_path) for route in ROUTES}
    described = {(m, path) for path, found in document(True)["paths"].items() for m in found}
    refused = {
        (route.method, route.path)
        for route in ROUTES
        if route.setting == "ollama_api" and not route.summary
    }
    assert served - described == refused


def test_the_document() -> None:
    async def go(**options: Any) -> Any:
        async with connect(FakeClient(), **options) as http:
            return await http.get("/openapi.json")

    answer = run(go())
    assert answer.status_code == 200
    assert answer.json()["openapi"] == "3.1.0"
    assert "security" not in answer.json()["paths"]["/v1/completions"]["post"]
    assert run(go(args=ServerArgs(api_key=("k",)))).status_code == 401
    paths = document(True)["paths"]
    assert paths["/v1/completions"]["post"]["security"] == [{"bearer": []}]
    assert paths["/v1/messages"]["post"]["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "security" not in paths["/health"]["get"]


_EVERY = 1 if WHOLE in os.environ else 4
"""One of so many of the cases that schemathesis derives from each field's bounds is sent."""
_derived: Counter[str] = Counter()
"""Such cases, of each route."""


@SCHEMA.hook
def filter_case(context: Any, case: Any) -> bool:
    if case.meta is None or case.meta.phase.name is not TestPhase.COVERAGE:
        return True
    _derived[case.operation.label] += 1
    return _derived[case.operation.label] % _EVERY == 1 % _EVERY


@pytest.fixture(scope="module", autouse=True)
def _no_proxies() -> Iterator[None]:
    """Avoids a search of the environment for each request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("requests.sessions.get_environ_proxies", lambda *_, **__: {})
        yield


@settings(
    max_examples=examples(6),
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def _answers_as_promised(case: Any) -> None:
    case.call_and_validate(
        checks=[
            checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ]
    )


@pytest.mark.parametrize("result", SCHEMA.get_all_operations(), ids=lambda one: one.ok().label)
def test_no_request_causes_a_server_error(result: Any) -> None:
    """Answers are never 5xx, and have documented shapes, statuses and types.

    Cases are derived here: `SCHEMA.parametrize()` derives those of all routes at each collection.
    """
    made = build_operation_test(
        config=SCHEMA.config, operation=result.ok(), test_func=_answers_as_promised,
        given_kwargs={}, feedback=_constants(),
    )  # fmt: skip
    made()
    assert MissingPathParameters.get(made) is None
    assert InvalidHeadersExampleMark.get(made) is None


@functools.cache
def _constants() -> FeedbackSources:
    """Returns the constants of the server's sources, which are also used as values."""
    return FeedbackSources(constants_value_source=make_constants_value_source(SCHEMA))
