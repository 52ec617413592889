"""Tiny random encoders, made by transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.models.checkpoints import redraw

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODERN = {**SIZES, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", SIZES),
    "bert-masked": ("BertForMaskedLM", {**SIZES, "hidden_act": "gelu_new"}),
    "bert-classes": ("BertForSequenceClassification", {**SIZES, "num_labels": 3}),
    "bert-score": ("BertForSequenceClassification", {**SIZES, "num_labels": 1}),
    "roberta": ("RobertaModel", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "roberta-classes": ("RobertaForSequenceClassification", {**SIZES, "pad_token_id": 1}),
    "xlm-r": ("XLMRobertaModel", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-r-score": (
        "XLMRobertaForSequenceClassification",
        {**SIZES, "pad_token_id": 1, "type_vocab_size": 1, "num_labels": 1},
    ),
    "modernbert": ("ModernBertModel", MODERN),
    "modernbert-biases": (
        "ModernBertForMaskedLM",
        {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "modernbert-classes": (
        "ModernBertForSequenceClassification",
        {**MODERN, "num_labels": 4, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "modernbert-score": ("ModernBertForSequenceClassification", {**MODERN, "num_labels": 1}),
}


def make(folder: Path, case: str) -> Any:
    """Saves the checkpoint of a case and returns the transformers model."""
    import transformers

    name, sizes = copy.deepcopy(CASES[case])
    kind = getattr(transformers, name)
    torch.manual_seed(sum(case.encode()))
    model = kind(kind.config_class(**sizes)).eval()
    redraw(model)
    model.save_pretrained(folder)
    return model
