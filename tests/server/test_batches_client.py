"""`/v1/files` and `/v1/batches`: with the official client on a real server, and in this process."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.loop.output import CompletionUpdate
from quire.errors import ConfigError, OverloadedError
from quire.server.apis.batch import service as service_module
from quire.server.apis.batch.form import FormReader, boundary_of
from quire.server.apis.batch.service import open_store
from quire.server.apis.batch.store import BatchStore
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.errors import ApiError
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import assert_error, run
from tests.server.server_process import MODEL, WAIT, Server
from tests.slow import examples

URL = "/v1/completions"


def line(custom_id: str, url: str = URL, **body: Any) -> str:
    body = body or {"prompt": [1, 2], "max_tokens": 3}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def lines_of(text: str) -> dict[str, Any]:
    return {item["custom_id"]: item for item in map(json.loads, text.splitlines())}


# -- a real server, the official client ------------------------------------------------------------


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.server.server_process import start_server

    server = start_server("--batch-dir", str(tmp_path_factory.mktemp("batches") / "own"))
    yield server
    server.stop()


def ended(client: openai.OpenAI, id: str) -> Any:
    deadline = time.monotonic() + WAIT
    while (batch := client.batches.retrieve(id)).status in (
        "validating", "in_progress", "finalizing", "cancelling",
    ):  # fmt: skip
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return batch


def test_a_batch(batch_server: Server) -> None:
    client = batch_server.client()
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    url = "/v1/chat/completions"
    text = "\n".join([line(f"r{i}", url, **chat) for i in range(4)] + [line("bad", url, n=0)])
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(text), "batch")
    assert file.expires_at is not None
    assert client.files.content(file.id).text == text
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=url,
        completion_window="24h",
        metadata={"for": "tests"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert batch.object == "batch"
    done = ended(client, batch.id)
    assert done.status == "completed", done
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 5, "completed": 4, "failed": 1}
    assert done.metadata == {"for": "tests"}
    assert done.in_progress_at is not None
    assert done.completed_at is not None
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    answers = lines_of(client.files.content(done.output_file_id).text)
    assert set(answers) == {"r0", "r1", "r2", "r3"}
    alone = client.chat.completions.create(**chat)  # type: ignore[call-overload]
    for answer in answers.values():
        body = answer["response"]["body"]
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    failures = lines_of(client.files.content(done.error_file_id).text)
    assert failures["bad"]["response"]["status_code"] == 400
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output"
    assert output.expires_at == output.created_at + 3600
    _is_listed(client, file.id, batch.id, done.output_file_id)
    with pytest.raises(openai.ConflictError, match="completed"):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert batch_server.metric('quire_batches_finished_total{status="completed"}') == 1
    assert batch_server.metric('quire_batch_requests_total{outcome="completed"}') == 4


def _is_listed(client: openai.OpenAI, file: str, batch: str, output: str) -> None:
    assert {item.id for item in client.files.list()} >= {file, output}
    assert {item.id for item in client.files.list(purpose="batch")} == {file}
    first = client.files.list(limit=1)
    assert len(first.data) == 1
    assert first.has_next_page()
    assert [item.id for item in client.batches.list()] == [batch]


def test_a_wrong_file(batch_server: Server) -> None:
    client = batch_server.client()
    text = "\n".join([line("a"), "{", line("a"), line("b", "/v1/embeddings", input="x")])
    file = client.files.create(file=text.encode(), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    done = ended(client, batch.id)
    assert done.status == "failed"
    assert done.errors is not None
    assert [(e.code, e.line) for e in done.errors.data or ()] == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
        ("mismatched_endpoint", 4),
    ]


# -- in this process -------------------------------------------------------------------------------


class Recorder(FakeClient):
    """Records the tenant of each request, and refuses the first `busy` ones as overloaded."""

    def __init__(self, busy: int = 0, **fields: Any) -> None:
        super().__init__(tokenizer=PlainTokenizer(), **fields)
        self.config.scheduler.max_num_seqs = 4
        self.config.args = None
        self.busy = busy
        self.ran_as: list[tuple[str, float]] = []

    async def generate(
        self, prompt: Any, params: Any, **options: Any
    ) -> AsyncIterator[CompletionUpdate]:
        self.ran_as.append((options["tenant"], options["share"]))
        self.busy -= 1
        if self.busy >= 0:
            raise OverloadedError("full")
        async for update in super().generate(prompt, params, **options):
            yield update


@asynccontextmanager
async def serving(
    folder: Path, engine: FakeClient, clock: Callable[[], float] = time.time, **args: Any
) -> AsyncIterator[httpx.AsyncClient]:
    store = BatchStore(folder, 1_000_000, 3600.0, clock)
    options = ServerArgs(generation_config="none", **args)
    app = build_app(engine, options, batch_store=store)  # type: ignore[arg-type]
    app.state.batches.start()
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        try:
            yield http
        finally:
            await app.state.batches.close()


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def upload(http: httpx.AsyncClient, text: str, **options: Any) -> str:
    form = {"files": {"file": ("in.jsonl", text.encode())}, "data": {"purpose": "batch"}}
    answer = await http.post("/v1/files", **form, **options)
    assert answer.status_code == 200, answer.text
    id: str = answer.json()["id"]
    return id


async def start(http: httpx.AsyncClient, text: str, **options: Any) -> str:
    body = {
        "input_file_id": await upload(http, text, **options),
        "endpoint": URL,
        "completion_window": "24h",
    }
    answer = await http.post("/v1/batches", json=body, **options)
    assert answer.status_code == 200, answer.text
    id: str = answer.json()["id"]
    return id


async def until(http: httpx.AsyncClient, id: str, *statuses: str, **options: Any) -> Any:
    while True:
        batch = (await http.get(f"/v1/batches/{id}", **options)).json()
        if batch["status"] in statuses:
            return batch
        await asyncio.sleep(0.005)


async def content(http: httpx.AsyncClient, id: str) -> dict[str, Any]:
    return lines_of((await http.get(f"/v1/files/{id}/content")).text)


def test_batches_wait_for_interactive_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_LONGEST_PAUSE", 0.01)
    engine = Recorder(busy=1)

    async def go() -> None:
        async with serving(tmp_path, engine) as http:
            batch = await until(http, await start(http, line("a")), "completed")
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            await http.post(URL, json={"prompt": [1]})

    run(go())
    assert engine.ran_as == [("/batch", 0.01), ("/batch", 0.01), ("", 1.0)]


def test_keys_see_their_own(tmp_path: Path) -> None:
    engine = Recorder()

    async def go() -> None:
        async with serving(tmp_path, engine, api_key=("one", "two")) as http:
            one, two = {"headers": as_key("one")}, {"headers": as_key("two")}
            assert (await http.get("/v1/files")).status_code == 401
            id = await start(http, line("a"), **one)
            batch = await until(http, id, "completed", **one)
            for path, code in (
                (f"/v1/batches/{id}", "batch_not_found"),
                (f"/v1/files/{batch['input_file_id']}", "file_not_found"),
                (f"/v1/files/{batch['output_file_id']}/content", "file_not_found"),
            ):
                assert (await http.get(path, **one)).status_code == 200
                answer = await http.get(path, **two)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
            assert (await http.get("/v1/batches", **two)).json()["data"] == []
            assert (await http.get("/v1/files", **two)).json()["data"] == []
            answer = await http.post(f"/v1/batches/{id}/cancel", **two)
            assert answer.status_code == 404
            body = {
                "input_file_id": batch["input_file_id"],
                "endpoint": URL,
                "completion_window": "24h",
            }
            answer = await http.post("/v1/batches", json=body, **two)
            assert_error(answer, 404, "input_file_id", "file_not_found")

    run(go())
    assert engine.ran_as == [("api-key-1/batch", 0.01)]


def test_cancelling(tmp_path: Path) -> None:
    engine = Recorder(free=0)

    async def go() -> None:
        async with serving(tmp_path, engine) as http:
            id = await start(http, "\n".join(line(f"r{i}") for i in range(9)))
            batch = await until(http, id, "in_progress")
            answer = await http.delete(f"/v1/files/{batch['input_file_id']}")
            assert_error(answer, 409, None, "file_in_use")
            while len(engine.ran_as) < 4:
                await asyncio.sleep(0.005)
            answer = await http.post(f"/v1/batches/{id}/cancel")
            assert answer.json()["status"] == "cancelling"
            batch = await until(http, id, "cancelled")
            assert batch["request_counts"] == {"total": 9, "completed": 0, "failed": 9}
            assert batch["output_file_id"] is None
            failures = await content(http, batch["error_file_id"])
            assert len(failures) == 9
            assert failures["r3"]["error"]["code"] == "batch_cancelled"
            assert (await http.post(f"/v1/batches/{id}/cancel")).status_code == 409

    run(go())


def test_after_a_restart(tmp_path: Path) -> None:
    async def go() -> None:
        engine = Recorder(free=0)
        async with serving(tmp_path, engine) as http:
            id = await start(http, "\n".join(line(f"r{i}") for i in range(6)))
            while len(engine.ran_as) < 4:
                await asyncio.sleep(0.005)
            store = http._transport.app.state.batches.store  # type: ignore[attr-defined]
            record = store.unfinished()[0]
        answered = {"status_code": 200, "request_id": "req_1", "body": {"earlier": True}}
        outcome = {"id": "x", "custom_id": "r0", "response": answered, "error": None}
        store.data(record.outputs).write_text(json.dumps(outcome) + "\n")
        (tmp_path / f"file-{'0' * 32}.jsonl").write_text("of an upload that was cut off")
        engine = Recorder()
        async with serving(tmp_path, engine) as http:
            assert not (tmp_path / f"file-{'0' * 32}.jsonl").exists()
            batch = await until(http, id, "completed")
            assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
            answers = await content(http, batch["output_file_id"])
            assert len(answers) == 6
            assert answers["r0"]["response"]["body"] == {"earlier": True}
        assert len(engine.ran_as) == 5
        async with serving(tmp_path, engine) as http:
            assert (await http.get(f"/v1/batches/{id}")).json() == batch

    run(go())


def test_an_expired_batch_ends(tmp_path: Path) -> None:
    now = [1e9]

    async def go() -> None:
        async with serving(tmp_path, Recorder(free=0), lambda: now[0]) as http:
            id = await start(http, line("a"))
            await until(http, id, "in_progress")
        now[0] += 25 * 3600
        async with serving(tmp_path, Recorder(), lambda: now[0]) as http:
            batch = await until(http, id, "expired")
            failures = await content(http, batch["error_file_id"])
            assert failures["a"]["error"]["code"] == "batch_expired"
            file = batch["input_file_id"]
            assert (await http.get(f"/v1/files/{file}")).status_code == 200
            now[0] += 120
            assert (await http.get(f"/v1/files/{file}")).status_code == 404, "its hour is over"
            assert (await http.get(f"/v1/batches/{id}")).status_code == 404

    run(go())


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear ...")
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        BatchStore(tmp_path, 1000, 3600.0)
    first = BatchStore(tmp_path / "own", 1000, 3600.0)
    with pytest.raises(ConfigError, match="another server"):
        BatchStore(tmp_path / "own", 1000, 3600.0)
    first.close()
    BatchStore(tmp_path / "own", 1000, 3600.0).close()


def test_refusals(tmp_path: Path) -> None:
    async def go() -> None:
        app = build_app(Recorder(), ServerArgs(generation_config="none"))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert_error(await http.get("/v1/files"), 404, None, "no_batch_dir")
        async with serving(tmp_path, Recorder(), batch_file_mb=0.01) as http:
            await _refuses_uploads(http)
            store = http._transport.app.state.batches.store  # type: ignore[attr-defined]
            store.max_bytes = 3
            answer = await http.post(
                "/v1/files", files={"file": ("a", b"four")}, data={"purpose": "batch"}
            )
            assert_error(answer, 413, None, "store_full")
            assert store.used == 0
            store.max_bytes = 1_000_000
            id = await upload(http, line("a"))
            body = {"input_file_id": id, "endpoint": URL, "completion_window": "24h"}
            for change, param, status in (
                ({"input_file_id": "file-x"}, "input_file_id", 404),
                ({"endpoint": "/v1/models"}, "endpoint", 400),
                ({"completion_window": "1h"}, "completion_window", 400),
                ({"metadata": {"a": 1}}, "metadata.a", 400),
                ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
                 "output_expires_after.seconds", 400),
            ):  # fmt: skip
                answer = await http.post("/v1/batches", json=body | change)
                assert answer.status_code == status, answer.text
                assert answer.json()["error"]["param"] == param
            assert (await http.get("/v1/files?limit=0")).status_code == 400
            assert len(list(tmp_path.iterdir())) == 3, "of what was refused nothing is left"

    run(go())


def test_a_key_leaves_room_for_others(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, Recorder(), api_key=("a", "b")) as http:
            store = http._transport.app.state.batches.store  # type: ignore[attr-defined]
            store.owner_bytes = 3000
            form: dict[str, Any] = {"data": {"purpose": "batch"}}

            async def put(key: str, size: int) -> httpx.Response:
                files = {"file": ("in.jsonl", b"x" * size)}
                return await http.post("/v1/files", files=files, headers=as_key(key), **form)

            assert (await put("a", 2000)).status_code == 200
            refused = await put("a", 2000)
            assert_error(refused, 413, None, "store_full")
            assert "--batch-key-gb" in refused.json()["error"]["message"]
            assert (await put("b", 2000)).status_code == 200
            # Output files of batches count, and a key without room cannot start a batch.
            id = await start(http, line("a"), headers=as_key("b"))
            await until(http, id, "completed", headers=as_key("b"))
            files = (await http.get("/v1/files", headers=as_key("b"))).json()["data"]
            assert len(files) == 3
            uploaded = next(file for file in files if file["purpose"] == "batch")
            store.owner_bytes = sum(file["bytes"] for file in files) - 1
            body = {
                "input_file_id": uploaded["id"], "endpoint": URL, "completion_window": "24h",
            }  # fmt: skip
            refused = await http.post("/v1/batches", json=body, headers=as_key("b"))
            assert_error(refused, 413, None, "store_full")

    run(go())


@pytest.mark.parametrize(
    ("args", "bytes_of_a_key"),
    [
        ({}, None),
        ({"api_key": ("a",)}, None),
        ({"api_key": ("a", "b")}, 500_000_000),
        ({"api_key": ("a",), "batch_key_gb": 0.25}, 250_000_000),
    ],
)
def test_room_of_a_key(tmp_path: Path, args: dict[str, Any], bytes_of_a_key: int | None) -> None:
    store = open_store(ServerArgs(batch_dir=str(tmp_path), batch_dir_gb=1.0, **args))
    assert store is not None
    assert store.owner_bytes == bytes_of_a_key
    store.close()
    with pytest.raises(ConfigError, match="batch_key_gb"):
        ServerArgs(batch_key_gb=0.0)


@pytest.mark.parametrize("sized", [False, True])
def test_uploads_at_once_keep_to_the_room(tmp_path: Path, sized: bool) -> None:
    content = b"x" * 6000
    form = b"--b\r\nContent-Disposition: form-data; name="
    form += b'"purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; name="file"; '
    form += b'filename="a"\r\n\r\n%s\r\n--b--\r\n' % content

    async def go() -> None:
        async with serving(tmp_path, Recorder(), batch_file_mb=0.007) as http:
            store = http._transport.app.state.batches.store  # type: ignore[attr-defined]
            store.max_bytes, arrived, gate = 20_000, 0, asyncio.Event()

            async def body() -> AsyncIterator[bytes]:
                nonlocal arrived
                arrived += 1
                yield form[:3000]
                await gate.wait()
                yield form[3000:]

            kind = {"content-type": "multipart/form-data; boundary=b"}
            if sized:
                kind["content-length"] = str(len(form))
            coming = [
                asyncio.create_task(http.post("/v1/files", content=body(), headers=kind))
                for _ in range(2)
            ]
            while store.used == 0 or arrived < 2:
                await asyncio.sleep(0.001)
            room = len(form) if sized else 7000
            assert store.used == 2 * room
            store.max_bytes = 2 * room + len(form) - 1
            refused = await http.post("/v1/files", content=form, headers=kind)
            assert_error(refused, 413, None, "store_full")
            coming[0].cancel()
            gate.set()
            await asyncio.gather(*coming, return_exceptions=True)
            assert store.used == len(content)

    run(go())


def test_names_of_files_are_text(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, Recorder()) as http:
            for name in ("файл.jsonl", "plain.jsonl", "日本 語.jsonl"):
                files = {"file": (name, b"{}")}
                answer = await http.post("/v1/files", files=files, data={"purpose": "batch"})
                assert answer.json()["filename"] == name

    run(go())


async def _refuses_uploads(http: httpx.AsyncClient) -> None:
    good = {"file": ("a.jsonl", b"{}")}
    for files, data, param, status in (
        (good, {"purpose": "fine-tune"}, "purpose", 400),
        (good, {}, "purpose", 400),
        (good, {"purpose": "batch", "odd": "1"}, "odd", 400),
        (good, {"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after", 400),
        (good, {"purpose": "batch", "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "5"}, "expires_after[seconds]", 400),
        ({"file": ("a.jsonl", b"")}, {"purpose": "batch"}, "file", 400),
        ({"other": ("a.jsonl", b"{}")}, {"purpose": "batch"}, "file", 400),
        ({"file": ("a.jsonl", b"x" * 20_000)}, {"purpose": "batch"}, None, 413),
    ):  # fmt: skip
        answer = await http.post("/v1/files", files=files, data=data)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
    answer = await http.post("/v1/files", json={"purpose": "batch"})
    assert answer.status_code == 415


# -- forms -----------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    content=st.binary(max_size=200) | st.sampled_from([b"\r\n--b", b"\r\n--", b"--bound", b"\r"]),
    size=st.integers(1, 40),
    preamble=st.sampled_from([b"", b"\r\n"]),
)
def test_forms_do_not_depend_on_how_they_are_cut(
    content: bytes, size: int, preamble: bytes
) -> None:
    if b"\r\n--bound" in content:
        return
    form = preamble + b"".join(
        b"--bound\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + body + b"\r\n"
        for head, body in (
            (b'name="purpose"', b"batch"),
            (b'name="file"; filename="a.jsonl"\r\nContent-Type: text/plain', content),
            (b'name="empty"', b""),
        )
    )
    form += b"--bound--\r\nand more"
    target = io.BytesIO()
    reader = FormReader(b"bound", target, "file")
    for start in range(0, len(form), size):
        reader.feed(form[start : start + size])
    reader.close()
    assert target.getvalue() == content
    assert reader.fields == {"purpose": "batch", "empty": ""}
    assert (reader.filename, reader.size) == ("a.jsonl", len(content))


@pytest.mark.parametrize(
    "form",
    [
        b"",
        b"no form at all",
        b"--bound\r\n",
        b"--bound--\r\n",
        b'text\r\n--bound\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--bound--',
        b'--bound  \r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--bound--',
        b"--bound\r\n" + b"x: y\r\n" * 17 + b"\r\n",
        b"--bound\r\n" + b"x: " + b"y" * 5000 + b"\r\nz: " + b"y" * 5000 + b"\r\n\r\n",
        b'--bound\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--bound--',
        b"--bound\r\n\r\nvalue\r\n--bound--",
        b'--bound\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx',
        b'--bound\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--bound--',
        b"--bound" + b"x" * 1000,
        b"--bound\r\n" + b"x" * 10_000,
        b'--bound\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * 5000,
        b'--bound\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 2 + b"--bound--",
    ],
)
def test_wrong_forms(form: bytes) -> None:
    reader = FormReader(b"bound", io.BytesIO(), "file")

    def read() -> None:
        reader.feed(form)
        reader.close()

    with pytest.raises(ApiError):
        read()


def test_boundaries() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    for wrong in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"):
        with pytest.raises(ApiError) as caught:
            boundary_of(wrong)
        assert caught.value.status == 415
