"""The choice of an adapter by a caller of `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire.errors import RequestError
from quire.features.call import CallType
from quire.features.lora.calls import LOAD, LoadAdapter
from quire.request import RequestOptions


class AdapterLoader(Protocol):
    """The parts of the engine's loop that are needed to read an adapter."""

    def takes(self, call: CallType[Any, Any]) -> bool: ...
    def call(self, call: CallType[Any, Any], request: Any) -> Any: ...
    def step(self) -> object: ...


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: a name that the caller chooses, and the adapter's folder."""

    name: str
    path: str | Path

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise RequestError("an adapter's name is a text that is not empty", "lora_request")
        if not isinstance(self.path, str | Path):
            raise RequestError(
                f"an adapter's path is a text, not {type(self.path).__name__}", "lora_request"
            )


Asked = LoRARequest | Sequence[LoRARequest | None]


def load_requested(core: AdapterLoader, asked: Asked, count: int) -> list[RequestOptions]:
    """Reads the adapters of `count` prompts, unless they are known already.

    Raises:
        RequestError: the number of adapters differs from `count`, an adapter cannot be used, or
            the engine takes no adapters.
    """
    each = [asked] * count if isinstance(asked, LoRARequest) else list(asked)
    if not all(one is None or isinstance(one, LoRARequest) for one in each):
        raise RequestError("lora_request is a LoRARequest, or a list of them", "lora_request")
    if len(each) != count:
        raise RequestError(f"{count} prompts but {len(each)} LoRA requests", "lora_request")
    for one in dict.fromkeys(one for one in each if one is not None):
        if not core.takes(LOAD):
            raise RequestError("this engine takes no adapters (--enable-lora)", "lora_request")
        answer: Future[None] = core.call(LOAD, LoadAdapter(one.name, str(one.path), known=True))
        while not answer.done():
            core.step()
        answer.result()
    return [{} if one is None else {"adapter": one.name} for one in each]
