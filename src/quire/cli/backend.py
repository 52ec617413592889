"""Backends of the terminal's commands: an engine started here, or a server elsewhere."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import threading
import uuid
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Protocol

from quire.config import EngineArgs
from quire.engine.process.client import EngineClient
from quire.errors import ConfigError, EngineDeadError, QuireError, RequestError
from quire.executor import OnProgress
from quire.http_client import HttpClient
from quire.sampling_params import SamplingParams
from quire.server.apis.openai.convert import model_defaults

Messages = list[dict[str, str]]
Answer = Generator[str, None, None]


class ChatBackend(Protocol):
    """Streams answers. Closing an iterator early stops the generation."""

    model: str

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Answer: ...

    def close(self) -> None: ...


class EngineBackend:
    """An engine in its own process; its client lives on a thread with an event loop.

    The terminal may block so.
    """

    def __init__(self, args: EngineArgs, on_progress: OnProgress | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._client = self._run(EngineClient.launch(args, on_progress))
        except BaseException:
            self._stop_loop()
            raise
        self.model = self._client.config.model_name
        self._defaults = model_defaults(self._client.config.model_path)

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Answer:
        tokenizer = self._tokenizer()
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        yield from self._stream(tokenizer.encode(text, add_special_tokens=False), sampling)

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Answer:
        self._tokenizer()
        yield from self._stream(prompt, sampling)

    def close(self) -> None:
        self._run(self._client.shutdown())
        self._stop_loop()

    def _tokenizer(self) -> Any:
        if self._client.tokenizer is None:
            raise ConfigError("this command needs the tokenizer", "skip_tokenizer_init")
        return self._client.tokenizer

    def _stream(self, prompt: Any, sampling: dict[str, Any]) -> Answer:
        params = SamplingParams(**{"max_tokens": None, **self._defaults, **sampling})
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for update in self._client.generate(
                    prompt, params, request_id=f"cli-{uuid.uuid4().hex}"
                ):
                    pieces.put(update.text)
                pieces.put(None)
            except Exception as error:
                pieces.put(error)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


class ServerBackend:
    """A running server that speaks OpenAI's chat completions."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client = HttpClient(url, api_key)
        self.model = self._first_model()

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Answer:
        body = {"model": self.model, "messages": messages, "stream": True, **sampling}
        connection, response = self._request("POST", "/v1/chat/completions", json.dumps(body))
        try:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == line.strip() or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise EngineDeadError(str(chunk["error"].get("message", "the server failed")))
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""
        finally:
            connection.close()

    def close(self) -> None:
        """Does nothing: each request has its own connection."""

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models")
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"{self._client.address} does not speak OpenAI's API", "url"
            ) from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection, response = self._client.request(method, path, body)
        if response.status != 200:
            text = response.read(65536)
            connection.close()
            raise _server_error(response.status, text)
        return connection, response


def _server_error(status: int, text: bytes) -> QuireError:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"the server answered with status {status}"
    return RequestError(message) if status < 500 else EngineDeadError(message)
