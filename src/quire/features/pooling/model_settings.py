"""Reads what a model makes of texts: its task, its pooling, its classes and its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.config import EngineArgs
from quire.errors import ConfigError, ModelError
from quire.features.pooling.args import PoolingArgs
from quire.features.pooling.sentence_files import SentenceFiles, read_sentence_files
from quire.models.config import spec_from_config
from quire.models.families import settings
from quire.models.spec import EncoderSpec, ModelSpec

_ENCODERS_ONLY = "cls", "max"


def embedding_settings(args: EngineArgs, folder: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that this feature reads from the model.

    Args:
        args: the engine's settings.
        folder: the model's folder.
        hf_config: the model's config.json.

    Raises:
        ConfigError: the model has no such pooling.
        ModelError: a file asks for something that is not supported.
    """
    spec, wanted = spec_from_config(hf_config), PoolingArgs.of(args).pooling
    if isinstance(spec, EncoderSpec) and spec.classifier is not None:
        return _classes(spec, hf_config)
    files = read_sentence_files(folder)
    pooling = files.pooling if wanted == "auto" else wanted
    if not isinstance(spec, EncoderSpec):
        if wanted in _ENCODERS_ONLY:
            raise ConfigError(f"pooling={wanted} needs an encoder, such as BERT", "pooling")
        # A decoder's last token is the only one that has seen the whole text.
        pooling = pooling if pooling == "mean" else "last"
    late = isinstance(spec, EncoderSpec) and (spec.projection or files.tokens)
    return {
        "task": "tokens" if late else "embed" if isinstance(spec, EncoderSpec) else "generate",
        "pooling": pooling or "mean",
        "matryoshka": _matryoshka(hf_config),
        "vector_size": _vector_size(spec, files),
        "prompts": files.prompts,
        "default_prompt": files.default_prompt,
    }


def _vector_size(spec: ModelSpec, files: SentenceFiles) -> int:
    """Returns the numbers of a vector behind all products."""
    size = spec.projection if isinstance(spec, EncoderSpec) else 0
    size = size or spec.hidden_size
    for module in files.dense:
        if module.inputs != size:
            raise ModelError(
                f"{module.folder}/config.json: in_features {module.inputs} differs from the {size} "
                "numbers of its input"
            )
        size = module.outputs
    return size


def _classes(spec: EncoderSpec, hf_config: dict[str, Any]) -> dict[str, Any]:
    assert spec.classifier is not None
    count, given = spec.classifier.classes, hf_config.get("id2label")
    named = given if isinstance(given, dict) else {}
    labels = tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))
    usual = "multi_label_classification" if count == 1 else "single_label_classification"
    problems = {
        "regression": "identity",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    return {
        "task": "classify",
        "labels": labels,
        "class_activation": settings.choice(hf_config, "problem_type", problems, usual),
        "score_activation": _score_activation(hf_config),
    }


def _score_activation(hf_config: dict[str, Any]) -> str:
    """Returns the activation of a pair's score, as `sentence-transformers` stores it."""
    own = hf_config.get("sentence_transformers")
    nested = own.get("activation_fn") if isinstance(own, dict) else None
    name = nested or hf_config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kinds = {"Sigmoid": "sigmoid", "Identity": "identity"}
    return str(
        settings.choice({"activation_fn": str(name).rpartition(".")[2]}, "activation_fn", kinds, "")
    )


def _matryoshka(hf_config: dict[str, Any]) -> tuple[int, ...] | None:
    sizes = hf_config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        return tuple(sorted(sizes))
    return () if hf_config.get("is_matryoshka") is True else None
