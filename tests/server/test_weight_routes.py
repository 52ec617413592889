"""Trainers' routes on a real server: updates, versions, pauses, and sleep in the process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quire
from quire import LLM, SamplingParams
from quire.features.weight_updates.broadcast_group import BroadcastGroup
from quire.features.weight_updates.payloads import JoinGroup
from quire.features.weight_updates.trainer import SharedWeights, describe
from tests.server.server_process import MODEL, Server, start_server

PROMPT = "Once upon a time there was"
KEYS = '[boss]\nkey = "boss"\nadmin = true\n[plain]\nkey = "plain"\n'
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.0, "return_token_ids": True}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Returns the embedded model's weights, and other ones."""
    folder = Path(quire.__file__).parent / "embedded" / "quire-tiny"
    own = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    other = {name: tensor.roll(1, -1).contiguous() for name, tensor in own.items()}
    return [own, other]


@pytest.fixture(scope="module")
def texts(weights: list[dict[str, Tensor]]) -> list[list[int]]:
    """Returns the tokens of both weights."""
    llm, found = LLM(), []
    for each in weights:
        llm.update_weights(each.items())
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), False)
        found.append(output.outputs[0].token_ids)
    llm.shutdown()
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    server = start_server("--api-key-file", str(keys), "--public-metrics", "--enable-sleep-mode")
    yield server
    server.stop()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def post(server: Server, path: str, body: Any = None, key: str = "boss") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, headers=headers, timeout=120, json=body)


def get(server: Server, path: str) -> Any:
    return httpx.get(server.url + path, headers={"Authorization": "Bearer boss"}, timeout=60)


def complete(server: Server, **fields: Any) -> Any:
    answer = post(server, "/v1/completions", {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def engine_pid(server: Server) -> int:
    pid = server.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_updates(
    server: Server, weights: list[dict[str, Tensor]], texts: list[list[int]], tmp_path: Path
) -> None:
    pid = engine_pid(server)
    first = complete(server)
    assert first["token_ids"] == texts[0]
    assert first["weight_versions"] == [{"version": 0, "tokens": len(texts[0])}]
    assert "weight_versions" not in complete(server, return_token_ids=False)
    save_file(weights[1], tmp_path / "model.safetensors")
    answer = post(server, "/weights/update", {"folder": str(tmp_path), "label": "step 1"})
    assert answer.json()["version"] == 1, answer.text
    choice = complete(server)
    assert choice["token_ids"] == texts[1]
    assert choice["weight_versions"] == [{"version": 1, "tokens": len(texts[1])}]
    assert get(server, "/get_weight_version").json() == {"weight_version": "step 1"}
    shared = SharedWeights(weights[0].items())
    body = {
        "shared_memory": shared.source.name,
        "tensors": msgspec.to_builtins(shared.source.tensors),
    }
    answer = post(server, "/update_weights_from_tensor", {**body, "weight_version": "step 2"})
    shared.close()
    assert answer.json()["success"], answer.text
    assert answer.json()["weight_version"] == "step 2"
    assert complete(server)["token_ids"] == texts[0]
    path = {"model_path": str(tmp_path), "flush_cache": True, "abort_all_requests": True}
    assert post(server, "/update_weights_from_disk", path).json()["success"]
    # In a stream each chunk has the versions of its tokens.
    client = server.client(api_key="plain")
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0.0, stream=True,
            extra_body={"return_token_ids": True},
        )
    )  # fmt: skip
    runs = [run for chunk in chunks for run in chunk.choices[0].weight_versions]
    assert {run["version"] for run in runs} == {3}
    assert sum(run["tokens"] for run in runs) == len(texts[1])
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    assert [run["version"] for run in chat.choices[0].weight_versions] == [3]
    assert engine_pid(server) == pid
    assert get(server, "/weights").json()["labels"] == {"1": "step 1", "2": "step 2", "3": ""}
    assert server.metric("quire_weight_updates_total") == 3
    assert server.metric("quire_weights_version") == 3


def test_a_group(server: Server, weights: list[dict[str, Tensor]], texts: list[list[int]]) -> None:
    port = free_port()
    group = JoinGroup("127.0.0.1", port, 0, 2, "trainer", timeout=60.0)
    made: list[BroadcastGroup] = []
    serve = threading.Thread(
        target=lambda: made.append(BroadcastGroup(group, 0, torch.device("cpu"), serves=True))
    )
    serve.start()
    body = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
        "group_name": "trainer", "backend": "gloo",
    }  # fmt: skip
    assert post(server, "/init_weights_update_group", body).json()["success"]
    serve.join()
    infos = [describe(name, tensor) for name, tensor in weights[0].items()]
    send = threading.Thread(target=lambda: made[0].send(list(weights[0].values())))
    send.start()
    body = {
        "names": [info.name for info in infos],
        "dtypes": [str(tensor.dtype) for tensor in weights[0].values()],
        "shapes": [list(info.shape) for info in infos], "group_name": "trainer",
    }  # fmt: skip
    answer = post(server, "/update_weights_from_distributed", body)
    send.join()
    assert answer.json()["success"], answer.text
    assert complete(server)["token_ids"] == texts[0]
    assert post(server, "/destroy_weights_update_group", {"group_name": "trainer"}).json()[
        "success"
    ]
    answer = post(server, "/update_weights_from_distributed", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "this engine has not joined a group 'trainer'"
    assert answer.json()["error"]["code"] == "weights_do_not_fit"


def test_vllm_and_trl_names(
    server: Server, weights: list[dict[str, Tensor]], texts: list[list[int]]
) -> None:
    address, size = "127.0.0.1", 2
    infos = [describe(name, tensor) for name, tensor in weights[1].items()]
    for name, rank in (("weight_transfer", 0), ("communicator", 1)):
        port = free_port()
        group = JoinGroup(address, port, 1 - rank, size, name, timeout=60.0)
        if rank:
            body: Any = {"host": address, "port": port, "world_size": size}
            path = "/init_communicator"
        else:
            found = {"master_address": address, "master_port": port, "rank_offset": 1}
            body = {"init_info": {**found, "world_size": size}}
            path = "/init_weight_transfer_engine"
        answers: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda p=path, b=body, a=answers: a.append(post(server, p, b))
        )
        ask.start()
        member = BroadcastGroup(group, rank, torch.device("cpu"), serves=True)
        ask.join()
        assert answers[0].status_code == 200, answers[0].text
        if rank:
            for info in infos[:3]:
                body = {"name": info.name, "dtype": "torch.bfloat16", "shape": list(info.shape)}
                assert post(server, "/update_named_param", body).status_code == 200
                member.send([weights[0][info.name]], src=1)
            assert post(server, "/close_communicator", {}).status_code == 200
            continue
        assert post(server, "/start_weight_update", {}).json()["paused"]
        for part in (infos[:5], infos[5:]):
            update = {
                "names": [info.name for info in part], "dtype_names": ["bfloat16"] * len(part),
                "shapes": [list(info.shape) for info in part],
            }  # fmt: skip
            sent = [weights[1][info.name] for info in part]
            send = threading.Thread(target=lambda m=member, s=sent: m.send(s))
            send.start()
            answer = post(server, "/update_weights", {"update_info": update})
            send.join()
            assert answer.status_code == 200, answer.text
        assert not post(server, "/finish_weight_update", {}).json()["paused"]
        assert complete(server)["token_ids"] == texts[1]
    folder = str(Path(quire.__file__).parent / "embedded" / "quire-tiny")
    assert post(server, "/weights/update", {"folder": folder}).status_code == 200


def test_pauses_and_aborts(server: Server) -> None:
    found: list[Any] = []
    ask = threading.Thread(target=lambda: found.append(complete(server, max_tokens=400)))
    ask.start()
    server.wait_for(lambda: server.metric("quire_requests_running") > 0, "a running request")
    assert post(server, "/pause_generation", {"mode": "in_place"}).json()["paused"]
    assert get(server, "/is_paused").json() == {"is_paused": True}
    assert post(server, "/abort_request", {"abort_all": True}).json() == {"aborted": 1}
    ask.join(30)
    assert found[0]["finish_reason"] == "abort"
    assert not post(server, "/continue_generation").json()["paused"]
    assert get(server, "/flush_cache").status_code == 200
    assert get(server, "/get_world_size").json() == {"world_size": 1}


@pytest.mark.parametrize(
    ("path", "body", "field", "code"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gAS"]},
         "serialized_named_tensors", "pickled_payload"),
        ("/update_weights_from_ipc", {}, None, "pickled_payload"),
        ("/weights/update", {}, "folder", None),
        ("/weights/update", {"folder": "a", "group": "b"}, "folder", None),
        ("/release_memory_occupation", {"tags": ["heap"]}, "tags", None),
    ],
)  # fmt: skip
def test_refusals(
    server: Server, path: str, body: Any, field: str | None, code: str | None
) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert code is None or error["code"] == code
    assert post(server, path, body, "plain").json()["error"]["code"] == "not_an_admin"


def test_sleep_in_the_process(server: Server, texts: list[list[int]]) -> None:
    pid, client = engine_pid(server), server.client(api_key="plain")
    before = complete(server)
    for level in (1, 2):
        answer = post(server, f"/sleep?level={level}")
        assert answer.json() == {"is_sleeping": True, "level": level}, answer.text
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="a")
        assert (caught.value.status_code, caught.value.code) == (503, "asleep")
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").json()["error"]["code"] == "asleep"
        assert server.metric("quire_engine_asleep") == 1
        assert post(server, "/wake_up?tags=weights").json()["is_sleeping"]
        assert post(server, "/wake_up?tags=kv_cache").json() == {"is_sleeping": False, "level": 0}
        assert complete(server)["token_ids"] == before["token_ids"]
    assert post(server, "/release_memory_occupation", {}).json()["asleep"] == ["kv", "weights"]
    assert post(server, "/resume_memory_occupation", {"tags": ["kv_cache"]}).json()["asleep"] == [
        "weights"
    ]
    assert post(server, "/resume_memory_occupation", {}).json()["asleep"] == []
    assert complete(server)["token_ids"] == texts[0]
    assert engine_pid(server) == pid
