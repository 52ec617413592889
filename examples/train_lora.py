"""Trains a LoRA adapter for the embedded model in a minute, with PyTorch and PEFT, and serves it.

    pip install peft
    python examples/train_lora.py [FOLDER]

The adapter makes the model's stories be about a dragon. PEFT writes its folder, which `quire serve
--lora dragon=FOLDER` reads, as other programs do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import quire
from quire import LLM, LoRARequest, SamplingParams

try:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
except ModuleNotFoundError as error:
    if error.name not in ("peft", "transformers"):
        raise
    sys.exit("This example trains with PEFT: pip install peft")

MODEL = Path(quire.__file__).parent / "embedded" / "quire-tiny"
STEPS = 30
LORA = LoraConfig(
    task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
)
STORIES = [
    "Once upon a time there was a little dragon. The dragon lived on a hill and loved to fly.",
    "One day, a green dragon saw a girl in the park. The dragon said, \"Do you want to fly?\"",
    "There was a dragon who was sad. He had no friends, because his fire was so hot.",
    "The little dragon went to the lake. She made a fire for her mom and they ate fish.",
    "Tom saw a big dragon in the sky. \"Look, a dragon!\" he said. The dragon smiled at him.",
    "Once upon a time, in a big house, there was a dragon named Ember. Ember liked to play.",
]  # fmt: skip


def train(model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    batch = tokenizer(STORIES, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    adapted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapted, lr=3e-3)
    model.train()
    for step in range(STEPS):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.2f}")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dragon-lora")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = get_peft_model(base, LORA)
    train(model, AutoTokenizer.from_pretrained(MODEL))
    model.to(torch.bfloat16).save_pretrained(str(folder))
    llm = LLM(enable_lora=True)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    for request in (None, LoRARequest("dragon", folder)):
        (output,) = llm.generate(["Once upon a time"], params, lora_request=request)
        print(f"{'base' if request is None else request.name}: {output.outputs[0].text!r}")
    llm.shutdown()


if __name__ == "__main__":
    main()
