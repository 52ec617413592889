"""The scheduler's and the loop's part: which request repeats which token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.arrays import int32
from quire.config import EngineConfig
from quire.errors import RequestError
from quire.executor import Capacity, Executor
from quire.features.call import CallType, RequestField
from quire.features.loop_feature import EngineInterface, LoopFeature
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder
from tests.features.constant_token.args import NONE, ConstantTokenArgs
from tests.features.constant_token.calls import SET_DEFAULT, TOKEN
from tests.features.constant_token.metrics import ConstantTokenStats

COLUMN = "constant_token"
"""The column that plans write for each request that takes a lane."""


class ConstantToken(Feature, LoopFeature):
    """Knows the token of each completion until it ends."""

    def __init__(self, config: EngineConfig) -> None:
        self._vocab_size = config.vocab_size
        self._default = self._checked(ConstantTokenArgs.of(config.args).constant_token)
        self._tokens: dict[str, int] = {}
        self._stats = ConstantTokenStats()

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        return self

    # -- the scheduler -------------------------------------------------------------------------

    def admit(self, request: Request) -> RequestError | None:
        self._tokens[request.request_id] = self._default
        return None

    def plan(self, builder: PlanBuilder) -> None:
        if builder.admits:
            lanes = [admit.lane for admit in builder.admits]
            tokens = [self._tokens[admit.request_id] for admit in builder.admits]
            builder.write(COLUMN, int32(lanes), int32(tokens))

    def finish(self, request: Request) -> None:
        if self._tokens.pop(request.request_id, NONE) != NONE:
            self._stats.completions += 1

    # -- the loop ------------------------------------------------------------------------------

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        return {SET_DEFAULT: self._set_default}

    def fields(self) -> Mapping[RequestField[Any], Callable[[str, Any], None]]:
        return {TOKEN: self._set_token}

    def stats(self) -> dict[str, Any]:
        return {"constant_token": self._stats}

    def _set_default(self, engine: EngineInterface, token: int) -> int:
        before, self._default = self._default, self._checked(token)
        return before

    def _set_token(self, request_id: str, token: int) -> None:
        token = self._checked(token)
        for completion in self._tokens:
            if completion.rpartition("/")[0] == request_id:
                self._tokens[completion] = token

    def _checked(self, token: int) -> int:
        if not NONE <= token < self._vocab_size:
            raise RequestError(f"token {token} is not in the vocabulary of {self._vocab_size}")
        return token
