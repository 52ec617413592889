"""Trains the embedded model by TRL's `GRPOTrainer`, with rollouts from a server.

    quire serve --port 8000 &
    python examples/trl_grpo.py http://localhost:8000      # needs pip install trl

Before each group of rollouts, the trainer's weights go to the server. The printed gap is the
largest difference between the server's log-probabilities and the trainer's own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import quire

FOLDER = Path(quire.__file__).parent / "embedded" / "quire-tiny"
PROMPTS = ["Once upon a time", "One day, a little fox"] * 8
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values that keep every token, in place of the model's own defaults."""


def post(path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(sys.argv[1] + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def update(model: torch.nn.Module) -> None:
    """Sends the trainer's weights to the server."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = {name: each.detach().contiguous() for name, each in model.named_parameters()}
        save_file(tensors, Path(folder, "model.safetensors"))
        post("/weights/update", {"folder": folder})


def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Returns token ids and log-probabilities of one completion for each prompt."""
    update(trainer.model)
    ids = [trainer.processing_class.encode(prompt) for prompt in prompts]
    answer = post(
        "/v1/completions",
        {"prompt": ids, "max_tokens": 16, **PLAIN, "return_token_ids": True,
         "return_sampling_info": True},
    )  # fmt: skip
    found = {
        "prompt_ids": ids,
        "completion_ids": [choice["token_ids"] for choice in answer["choices"]],
        "logprobs": [c["sampling_info"]["processed_logprobs"] for c in answer["choices"]],
    }
    print(f"gap {gap(trainer.model, *(each[0] for each in found.values())):.1e}")
    return found


@torch.inference_mode()
def gap(
    model: torch.nn.Module, prompt: list[int], completion: list[int], logprobs: list[float]
) -> float:
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    return float((own - torch.tensor(logprobs)).abs().max())


def reward(completions: list[str], **_: Any) -> list[float]:
    """Returns the number of short words of each completion."""
    return [float(sum(len(word) < 4 for word in text.split())) for text in completions]


def main() -> None:
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, num_generations=4,
        max_completion_length=16, max_steps=4, use_cpu=True, bf16=False, report_to=[],
        logging_steps=1, learning_rate=1e-4,
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
        rollout_func=rollouts,
    )
    trainer.train()


if __name__ == "__main__":
    main()
