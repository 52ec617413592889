"""Updates and sleep through `LLM`."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ModelError, RequestError
from tests.features.weight_updates.changed_models import GREEDY, Models

PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def open_llm(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=128, block_size=4, **settings)


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    (output,) = llm.generate([PROMPT], params, False)
    (completion,) = output.outputs
    assert sum(count for _, count in completion.weight_versions) == len(completion.token_ids)
    return completion.token_ids


def test_updates(models: Models) -> None:
    llm, expected = open_llm(models.folders[0]), []
    for folder in models.folders[1:]:
        fresh = open_llm(folder)
        expected.append(tokens_of(fresh))
        fresh.shutdown()
    assert llm.update_weights(models.tensors(1).items()) == 1
    assert tokens_of(llm) == expected[0]
    assert llm.update_weights(models.folders[2], mode="retract", label="two") == 2
    assert tokens_of(llm) == expected[1]
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=3, logprobs=1), False)
    assert output.outputs[0].weight_versions == [(2, 3)]
    with pytest.raises(ModelError, match="unexpected tensor"):
        llm.update_weights([("none", models.tensors(1)["lm_head.weight"])])
    name, tensor = next(iter(models.tensors(1).items()))
    with pytest.raises(RequestError, match="each name once"):
        llm.update_weights([(name, tensor)] * 2)
    with pytest.raises(RequestError, match="pairs of a name and a tensor"):
        llm.update_weights([name])  # type: ignore[list-item]
    assert tokens_of(llm) == expected[1]
    with pytest.raises(RequestError, match="enable-sleep-mode"):
        llm.sleep()
    llm.shutdown()


@pytest.mark.parametrize("ranks", [1, 2])
def test_sleep(models: Models, ranks: int) -> None:
    llm = open_llm(models.folders[0], enable_sleep_mode=True, tensor_parallel_size=ranks)
    first = tokens_of(llm)
    addresses = [parameter.data_ptr() for parameter in _model(llm).parameters()]
    for level in (1, 2):
        llm.sleep(level)
        llm.sleep(level)
        llm.wake_up(["kv"])
        llm.wake_up()
        assert tokens_of(llm) == first
    llm.sleep(2, tags=["weights"])
    with pytest.raises(RequestError, match="wake it up first"):
        llm.update_weights(models.folders[1])
    llm.wake_up()
    llm.update_weights(models.folders[1])
    assert tokens_of(llm) != first
    # Dropped weights are those of the model's files again, which is another version.
    llm.sleep(2)
    llm.wake_up()
    (output,) = llm.generate([PROMPT], GREEDY, False)
    assert output.outputs[0].token_ids == first
    assert output.outputs[0].weight_versions == [(2, 24)]
    assert [parameter.data_ptr() for parameter in _model(llm).parameters()] == addresses
    llm.shutdown()


def _model(llm: LLM) -> object:
    executor = llm._core._executor
    return getattr(executor, "local", executor).model
