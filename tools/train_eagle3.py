"""Trains an EAGLE-3 head for a model on the model's own answers.

    python tools/train_eagle3.py MODEL PROMPTS.jsonl [PROMPTS.jsonl ...] --out HEAD --seconds 180

MODEL is a folder that `transformers` and Quire read. Each line of PROMPTS has `messages`, and the
model answers after the last one. Quire writes the answers, greedily and at temperature 0.7; they
stay in `HEAD/answers.npz`, and a second run takes them from there. One prompt in twenty is held
out. Training lasts `--seconds`, and ends with the share of drafts that are the model's own choice
on the held-out answers, by the number of drafts before.

The head has one layer of the model's widths. It drafts the tokens that occur most often in the
answers, and keeps their rows of the model's LM head as they are. The checkpoint has the layout of
the authors' code (`midlayer.*`, `d2t`, `t2d`):

    quire serve MODEL --speculative '{"method": "eagle3", "model": "HEAD"}'
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent / "embedded_model"))
from batches import IGNORE, Documents, Rows, batches, whole_rows
from eagle import DEPTH, EagleHead, HeadShape, export_head
from eagle_training import HeadTrainer
from model import Shape
from training import Plan, document_mask, forever

TEMPERATURES = 0.0, 0.7
HELD_OUT = 20
"""One prompt of so many is held out."""
_UNTIMED, _PRINTED = 10, 50
"""Steps before the number of steps is estimated, and steps between two lines of the log."""


def read_prompts(files: Sequence[Path]) -> list[list[dict[str, str]]]:
    """Returns the messages of each line."""
    return [
        json.loads(line)["messages"]
        for file in files
        for line in file.read_text("utf-8").splitlines()
        if line.strip()
    ]


def write_answers(
    model: str, prompts: list[list[dict[str, str]]], device: str, limit: int, out: Path
) -> None:
    """Writes prompts with the model's answers as token ids.

    Args:
        limit: most tokens of an answer; prompts may have as many.
        out: `.npz` with `tokens`, `learn` (1 for an answer's tokens), `starts` of the documents,
            and `held_out` by document.
    """
    # The engine is needed for this only: a second training run starts without it.
    from quire import LLM, SamplingParams

    llm = LLM(
        model, device=device, max_model_len=2 * limit, kv_cache_gb=8 if device != "cpu" else 1
    )
    tokenizer = llm.get_tokenizer()
    requests, settings, held_out = [], [], []
    for number, messages in enumerate(prompts):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= limit:
            continue
        for temperature in TEMPERATURES:
            requests.append({"prompt_token_ids": ids})
            settings.append(
                SamplingParams(
                    temperature=temperature, max_tokens=limit, seed=number, detokenize=False
                )
            )
            held_out.append(number % HELD_OUT == 0)
    begun = time.perf_counter()
    outputs = llm.generate(requests, settings, use_tqdm=False)
    seconds = time.perf_counter() - begun
    llm.shutdown()
    texts, learn = [], []
    for output in outputs:
        answer = list(output.outputs[0].token_ids)
        texts.append(np.array([*output.prompt_token_ids, *answer], dtype=np.int32))
        learn.append(np.repeat(np.uint8([0, 1]), [len(output.prompt_token_ids), len(answer)]))
    np.savez(
        out,
        tokens=np.concatenate(texts),
        learn=np.concatenate(learn),
        starts=np.cumsum([0, *map(len, texts)]),
        held_out=np.array(held_out),
    )
    total = int(sum(part.sum() for part in learn))
    print(f"{len(texts)} answers, {total:,} tokens in {seconds:.0f} s", flush=True)


def read_answers(file: Path, device: str) -> tuple[Documents, Documents]:
    """Returns the documents to learn from, and the held-out ones."""
    found = Documents.load(file, device)
    with np.load(file) as arrays:
        held_out = torch.from_numpy(arrays["held_out"]).to(device)
    return found.chosen(~held_out), found.chosen(held_out)


class HubTeacher:
    """Reads a model of `transformers`."""

    def __init__(self, model: Any, taps: tuple[int, ...]) -> None:
        self.model, self.taps = model, taps

    def __call__(self, tokens: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = document_mask(document, None)
        found = self.model(
            input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False
        )
        tapped = torch.cat([found.hidden_states[count] for count in self.taps], dim=-1)
        behind = functional.pad(tokens[:, 1:], (0, 1))
        return tapped, found.logits, self.model.get_input_embeddings()(behind)


def shapes(config: Any) -> tuple[Shape, HeadShape]:
    """Returns the sizes of the model and of its head."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    target = Shape(
        hidden_size=config.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=config.intermediate_size,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        rms_norm_eps=config.rms_norm_eps,
    )
    taps = (2, layers // 2, layers - 3)
    return target, HeadShape(heads, kv_heads, head_dim, config.intermediate_size, taps)


def frequent_tokens(docs: Documents, count: int) -> Tensor:
    """Returns the `count` most frequent tokens of the answers in ascending order, int64."""
    seen = torch.bincount(docs.tokens[docs.learn].long(), minlength=count)
    return seen.topk(count).indices.sort().values


def train_for(seconds: float, trainer: HeadTrainer, feed: Iterator[Rows]) -> None:
    """Trains for so long. The rate falls by the steps that the time left is expected to allow."""
    plan, recent, number = trainer.plan, list[Tensor](), 0
    begun = time.perf_counter()
    while (spent := time.perf_counter() - begun) < seconds:
        if number >= _UNTIMED:
            plan.steps = max(number + 1, round(number * seconds / spent))
        recent.append(trainer.step(next(feed), number))
        number += 1
        if number % _PRINTED == 0:
            loss, *agreed = torch.stack(recent).mean(0).tolist()
            shares = " ".join(f"{share:.3f}" for share in agreed)
            print(
                f"{number} steps of {plan.steps}: loss {loss:.3f}, agreement {shares}", flush=True
            )
            recent.clear()
    plan.steps = number


def agreement(trainer: HeadTrainer, rows: Rows) -> list[float]:
    """Returns the share of drafts that are the model's own choice, by the drafts before."""
    shares, weights = [], []
    for batch in batches(rows, trainer.plan.batch, None):
        # Without gradients the compiled function would be compiled again.
        shares.append(trainer.losses(batch)[1].detach())
        weights.append((batch[1] != IGNORE).sum())
    weight = torch.stack(weights).float()
    mean = (torch.stack(shares) * weight[:, None]).sum(0) / weight.sum()
    found: list[float] = mean.tolist()
    return found


def export(head: EagleHead, rows: Tensor, kept: Tensor, folder: Path) -> None:
    """Writes the head with its part of the vocabulary."""
    export_head(head, folder)
    vocab = head.target.vocab_size
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = rows.detach().to("cpu", torch.bfloat16).contiguous()
    weights["d2t"] = kept.cpu() - torch.arange(len(kept))
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept.cpu(), True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["draft_vocab_size"] = len(kept)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(args: argparse.Namespace, answers: Path) -> None:
    # `transformers` is imported here because answers are written without it.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device)
    model.eval().requires_grad_(False)
    target, shape = shapes(model.config)
    learned, held_out = read_answers(answers, args.device)
    kept = frequent_tokens(learned, min(args.draft_vocab, target.vocab_size))
    rows = model.get_output_embeddings().weight[kept]
    head = EagleHead(target, shape).to(args.device)
    plan = Plan(1 << 20, 0, args.batch, args.length, args.lr, decay=0.05, cooldown=0.6)
    trainer = HeadTrainer(head, HubTeacher(model, shape.taps), plan, rows, kept, args.depth)
    pad = AutoTokenizer.from_pretrained(args.model).pad_token_id or 0
    learned, held_out = learned.shorter(args.length), held_out.shorter(args.length)
    feed = forever(lambda epoch: whole_rows(learned, args.length, pad, epoch), args.batch)
    train_for(args.seconds, trainer, feed)
    shares = agreement(trainer, whole_rows(held_out, args.length, pad, 0))
    export(head, rows, kept, args.out)
    held = held_out.tokens[held_out.learn]
    report = {
        "agreement": shares,
        "covered": torch.isin(held, kept.int()).float().mean().item(),
        "answer_tokens": int(learned.learn.sum()),
        "held_out_tokens": len(held),
        "trained_tokens": plan.steps * args.batch * args.length,
        "parameters": sum(weight.numel() for weight in head.parameters()),
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+", type=Path, help="JSON Lines with `messages`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=180.0, help="time to train")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens that can be drafted")
    parser.add_argument("--depth", type=int, default=DEPTH, help="drafts that it learns in a row")
    parser.add_argument("--limit", type=int, default=320, help="most tokens of an answer")
    parser.add_argument("--batch", type=int, default=16, help="rows of a training step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of such a row")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    answers = args.out / "answers.npz"
    if not answers.exists():
        write_answers(args.model, read_prompts(args.prompts), args.device, args.limit, answers)
        gc.collect()
        torch.cuda.empty_cache()
    train(args, answers)


if __name__ == "__main__":
    main()
