"""A tiny vision model in real servers: all APIs, counts, errors, batches and peers."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.features.images.checkpoints import CASES, save_checkpoint
from tests.server.server_process import MODEL, Server, start_server

COUNT = 8
GREEDY = {"temperature": 0, "model": MODEL}


def png(seed: int, width: int = 61, height: int = 47) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    return stream.getvalue()


def text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{text64(data)}"


def checkpoint(case: str, made: Path) -> Path:
    """Writes a case's checkpoint to a folder, and returns the folder."""
    save_checkpoint(case, made)
    weights = load_file(made / "model.safetensors")
    # Only tokens of characters have logits other than 0, so all answers have a text.
    weights["lm_head.weight"][[*range(10), *range(90, 211)]] = 0
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3-vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = str(tmp_path_factory.mktemp("batches"))
    flags = ("--max-num-batched-tokens", "64", "--image-cache-gb", "0.01", "--batch-dir", files)
    flags += ("--ollama-api", "0")
    found = start_server(str(folder), "--dtype", "float32", *flags)
    yield found
    found.stop(signal.SIGKILL)


def post(server: Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def chat_body(*content: Any) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": uri(part)}}
        for part in content
    ]
    messages = [{"role": "user", "content": parts}]
    return {**GREEDY, "messages": messages, "max_tokens": COUNT, "ignore_eos": True}


def chat(server: Server, *content: Any) -> Any:
    answer = post(server, "/v1/chat/completions", chat_body(*content))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_all_apis_answer_alike(server: Server) -> None:
    compare_apis(server)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "qwen3-vl"])
def test_other_families(case: str, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--image-cache-gb", "0.01", "--ollama-api", "0")
    found = start_server(str(checkpoint(case, tmp_path)), *flags)
    try:
        compare_apis(found)
    finally:
        found.stop(signal.SIGKILL)


def compare_apis(server: Server) -> None:
    """Asks all APIs about one image."""
    data, question = png(1), "what is it"
    first = chat(server, data, question)
    text, count = first["choices"][0]["message"]["content"], first["usage"]["prompt_tokens"]
    assert text
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": text64(data)},
    }
    content: list[Any] = [block, {"type": "text", "text": question}]
    body = {**GREEDY, "max_tokens": COUNT, "messages": [{"role": "user", "content": content}]}
    messages = post(server, "/v1/messages", body).json()
    part = {"type": "input_image", "image_url": uri(data)}
    content = [part, {"type": "input_text", "text": question}]
    body = {**GREEDY, "max_output_tokens": COUNT, "input": [{"role": "user", "content": content}]}
    responses = post(server, "/v1/responses", body).json()
    ollama = post(
        server,
        "/api/chat",
        {
            "model": MODEL,
            "stream": False,
            "options": {"temperature": 0, "num_predict": COUNT},
            "messages": [{"role": "user", "content": question, "images": [text64(data)]}],
        },
    ).json()
    assert messages["content"][0]["text"] == text
    assert messages["usage"]["input_tokens"] + messages["usage"]["cache_read_input_tokens"] == count
    assert responses["output"][0]["content"][0]["text"] == text
    assert responses["usage"]["input_tokens"] == count
    assert ollama["message"]["content"] == text
    assert ollama["prompt_eval_count"] == count
    asked = {"model": MODEL, "messages": chat_body(data, question)["messages"]}
    assert post(server, "/tokenize", asked).json()["count"] == count


def test_a_second_question_costs_its_text(server: Server) -> None:
    data = png(2)
    chat(server, data, "a first question")
    encoded = server.metric("quire_images_encoded_total")
    usage = chat(server, data, "something else")["usage"]
    image = usage["prompt_tokens"] - len("<user>something else<assistant>") - 2
    assert usage["prompt_tokens_details"]["cached_tokens"] >= image
    assert server.metric("quire_images_encoded_total") == encoded
    salted = {**chat_body(data, "something else"), "cache_salt": "mine"}
    usage = post(server, "/v1/chat/completions", salted).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.metric("quire_images_encoded_total") == encoded + 1
    other = chat(server, png(3), "something else")["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] < 16


def test_streams_and_many_at_once(server: Server) -> None:
    """Streams give what whole answers give, also when many arrive with images and without."""
    asked = [(png(seed), f"question {seed}") for seed in range(4)] + [("only text",)] * 2
    expected = [chat(server, *each)["choices"][0]["message"]["content"] for each in asked]

    def stream(content: Any) -> str:
        body = {**chat_body(*content), "stream": True}
        text = ""
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=60
        ) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        return text

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(stream, asked)) == expected
    assert server.metric("quire_image_pixel_bytes") == 0


def test_videos(server: Server) -> None:
    frames = [png(seed) for seed in range(5)]
    video = f"data:video/jpeg;base64,{','.join(map(text64, frames))}"
    parts: list[Any] = [
        {"type": "video_url", "video_url": {"url": video}},
        {"type": "image_url", "image_url": {"url": uri(frames[0])}},
        {"type": "text", "text": "what happens"},
    ]
    body = chat_body("")
    body["messages"][0]["content"] = parts
    first = post(server, "/v1/chat/completions", body).json()
    assert first["choices"][0]["message"]["content"]
    counted = {"model": MODEL, "messages": body["messages"]}
    assert post(server, "/tokenize", counted).json()["count"] == first["usage"]["prompt_tokens"]
    again = post(server, "/v1/chat/completions", body).json()
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first["usage"]["prompt_tokens"] - 32
    assert server.metric("quire_image_pixel_bytes") == 0
    for data in (b"\0\0\0\x18ftypisom" + bytes(64), b"no video", frames[0]):
        parts[0]["video_url"]["url"] = f"data:video/mp4;base64,{text64(data)}"
        refused = post(server, "/v1/chat/completions", body)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("messages[0].content[0]", "invalid_image")
    parts[0]["video_url"]["url"] = "https://example.com/clip.mp4"
    refused = post(server, "/v1/chat/completions", body)
    assert "--allow-image-hosts" in refused.json()["error"]["message"]


def open_pixels(server: Server) -> int:
    """Counts descriptors of pixels in the server's processes."""
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        # Processes and descriptors may end meanwhile.
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == server.process.pid:
                links = map(os.readlink, Path("/proc", name, "fd").iterdir())
                count += sum("quire-pixels" in link for link in links)
    return count


def test_pixels_are_freed(server: Server) -> None:
    """Clients leave in the middle of a stream, and requests are refused."""
    body = {**chat_body(png(8), "long"), "stream": True, "max_tokens": 800}
    url = f"{server.url}/v1/chat/completions"
    images = server.metric("quire_images_total")
    for _ in range(3):
        with httpx.stream("POST", url, json=body, timeout=60) as lines:
            next(lines.iter_lines())
    refused = chat_body(png(8), b"")
    assert post(server, "/v1/chat/completions", refused).status_code == 400
    server.wait_for(lambda: server.metric("quire_requests_running") == 0, "the requests' end")
    server.wait_for(lambda: open_pixels(server) == 0, "the pixels' end")
    assert server.metric("quire_image_pixel_bytes") == 0
    assert server.metric("quire_images_total") == images + 3


def bomb() -> bytes:
    """Returns a small file of 10,000 times 10,000 pixels."""
    stream = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(stream, "PNG")
    return stream.getvalue()


def frames() -> bytes:
    stream = io.BytesIO()
    first, second = Image.new("L", (9, 9), 1), Image.new("L", (9, 9), 200)
    first.save(stream, "GIF", save_all=True, append_images=[second])
    return stream.getvalue()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (uri(b"hello"), "invalid_image"),
        (uri(png(1)[:-40]), "invalid_image"),
        (uri(bomb()), "image_too_large"),
        (uri(frames()).replace("image/png", "image/gif"), "invalid_image"),
        (uri(png(1)).replace("image/png", "image/jpeg"), "invalid_image"),
        (uri(png(1)).replace("image/png", "text/html"), "invalid_image"),
        (uri(png(1, 1000, 2)), "invalid_image"),
        ("data:image/png;base64,?", "invalid_image"),
        ("http://127.0.0.1/x.png", "unsupported_parameter"),
        ("file:///etc/passwd", "invalid_image"),
    ],
)
def test_refused_images(server: Server, url: str, code: str) -> None:
    body = chat_body("a", b"")
    body["messages"][0]["content"][1]["image_url"]["url"] = url
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("messages[0].content[1]", code)
    assert "messages[0].content[1]" in error["message"]


def test_too_many_images_and_marks_in_texts(server: Server) -> None:
    answer = post(server, "/v1/chat/completions", chat_body(*[png(1, 9, 9)] * 33))
    assert answer.json()["error"]["param"] == "messages[0].content[32]"
    answer = post(server, "/v1/chat/completions", chat_body(png(1), "<|image_pad|>"))
    assert answer.status_code == 400
    assert "2 images" in answer.json()["error"]["message"]
    assert post(server, "/v1/chat/completions", chat_body("<|image_pad|>")).status_code == 200


def test_files_and_batches(server: Server) -> None:
    data, question = png(5), "from a file"
    expected = chat(server, data, question)["choices"][0]["message"]["content"]
    files = f"{server.url}/v1/files"
    file = httpx.post(files, data={"purpose": "vision"}, files={"file": data}).json()
    content = [
        {"type": "input_image", "file_id": file["id"]},
        {"type": "input_text", "text": question},
    ]
    asked = {**GREEDY, "max_output_tokens": COUNT, "input": [{"role": "user", "content": content}]}
    found = post(server, "/v1/responses", asked).json()
    assert found["output"][0]["content"][0]["text"] == expected
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": chat_body(data, question),
    }
    lines = {"file": ("b.jsonl", json.dumps(line).encode())}
    uploaded = httpx.post(files, data={"purpose": "batch"}, files=lines).json()
    body = {
        "input_file_id": uploaded["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = post(server, "/v1/batches", body).json()
    url = f"{server.url}/v1/batches/{batch['id']}"
    server.wait_for(lambda: httpx.get(url).json()["status"] == "completed", "the batch")
    output = httpx.get(f"{files}/{httpx.get(url).json()['output_file_id']}/content").json()
    message = output["response"]["body"]["choices"][0]["message"]
    assert message["content"] == expected


@pytest.mark.slow
def test_several_processes(folder: Path, server: Server) -> None:
    """API workers, engines and ranks are processes of their own."""
    asked = [(png(seed), f"question {seed}") for seed in range(3)]
    expected = [chat(server, *each)["choices"][0]["message"]["content"] for each in asked]
    flags = ("--api-workers", "2", "--tensor-parallel-size", "2", "--image-cache-gb", "0.01")
    other = start_server(str(folder), "--dtype", "float32", *flags)
    try:
        for each, text in zip(asked, expected, strict=True):
            assert chat(other, *each)["choices"][0]["message"]["content"] == text
        assert other.stop() == 0
    finally:
        other.stop(signal.SIGKILL)


@pytest.mark.slow
def test_peers(folder: Path, server: Server) -> None:
    """A decode server computes prompts with images itself, and others still come from the peer."""
    flags = ("--dtype", "float32", "--image-cache-gb", "0.01")
    writer = start_server(str(folder), *flags, "--role", "prefill")
    reader = start_server(
        str(folder), *flags, "--role", "decode", "--peer", writer.url,
        "--remote-prefill-tokens", "16",
    )  # fmt: skip
    try:
        image, text = (png(7), "about this"), ("a text that is longer than sixteen tokens",)
        for asked in (image, text):
            found = chat(reader, *asked)["choices"][0]["message"]["content"]
            assert found == chat(server, *asked)["choices"][0]["message"]["content"]
        assert reader.metric('quire_kv_fetches_total{outcome="done"}') == 1
    finally:
        for each in (reader, writer):
            each.stop(signal.SIGKILL)
