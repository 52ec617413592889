"""Make quire-tiny and quire-tiny-draft from the data folder: the one command.

    python build.py --data DIR --work DIR --out DIR [--device cuda]

Stages: prepare, tiny, answers, draft, check. A stage whose result is in the work or output folder
already is skipped, so that a run that broke off goes on where it was; `--stages` picks some.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from agreement import agreement
from batches import Documents, Rows, stream_rows, whole_rows
from bits_per_byte import bits_per_byte
from distillation_data import answer_all, prompts_of, save_documents
from model import DRAFT, TINY, Qwen3, export, load
from prepare import CONTEXT, prepare
from tokenizers import Tokenizer
from training import Plan, Trainer, train

STAGES = ("prepare", "tiny", "answers", "draft", "check")


class Build:
    """The folders, the token ids and the sizes of one build."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.out = args, args.work, args.out
        self.tiny, self.draft = self.out / "quire-tiny", self.out / "quire-tiny-draft"
        self._loaded: dict[str, Documents] = {}

    def ids(self) -> dict[str, int]:
        tokenizer = Tokenizer.from_file(str(self.work / "tokenizer/tokenizer.json"))
        names = {"eos": "<|im_end|>", "pad": "<|endoftext|>", "start": "<|im_start|>"}
        return {key: tokenizer.token_to_id(token) for key, token in names.items()}

    def documents(self, name: str) -> Documents:
        if name not in self._loaded:
            self._loaded[name] = Documents.load(self.work / f"{name}.npz", self.args.device)
        return self._loaded[name]

    def plan(self, tokens: int, chat_share: float, lr: float, **more: float) -> Plan:
        batch, length = self.args.batch, self.args.length
        steps = max(tokens // (batch * length), 4)
        return Plan(steps, int(steps * chat_share), batch, length, lr, **more)

    def text_rows(self, epoch: int) -> Rows:
        """Stories, storybooks and conversations as text, and the books, each token learned."""
        ids, length = self.ids(), self.args.length
        parts = [
            stream_rows(self.documents(n), length, ids["pad"], ids["start"], 1000 + epoch)
            for n in ("text", "books")
        ]
        return tuple(torch.cat(pair) for pair in zip(*parts, strict=True))

    def chat_rows(self, epoch: int) -> Rows:
        """Conversations, whole, with only the assistant's tokens learned."""
        docs = self.documents("chat")
        return whole_rows(docs, self.args.length, self.ids()["pad"], 2000 + epoch)

    def answer_rows(self, epoch: int) -> Rows:
        """quire-tiny's own answers beside the conversations."""
        docs = self.documents("answers").joined(self.documents("chat"))
        return whole_rows(docs, self.args.length, self.ids()["pad"], 3000 + epoch)

    def valid_rows(self) -> Rows:
        docs = self.documents("valid")
        return whole_rows(docs, self.args.length, self.ids()["pad"], 0, all_tokens=True)

    def finish(self, model: Qwen3, folder: Path, plan: Plan) -> None:
        """Export with the tokenizer, and keep the log in the work folder."""
        ids = self.ids()
        export(model, folder, {"eos": ids["eos"], "pad": ids["pad"]})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(self.work / "tokenizer" / name, folder / name)
        (self.work / f"{folder.name}.log.json").write_text(json.dumps(asdict(plan), indent=1))

    def train_tiny(self) -> None:
        args = self.args
        torch.manual_seed(args.seed)
        model = Qwen3(TINY, dropout=args.dropout).to(args.device)
        plan = self.plan(args.tokens, 0.12, args.lr, decay=args.decay)
        trainer = Trainer(model, plan)
        train(trainer, self.text_rows, self.chat_rows, self.valid_rows(), every=args.every)
        self.finish(model, self.tiny, plan)

    def write_answers(self) -> None:
        ids, args = self.ids(), self.args
        model = load(self.tiny, TINY).to(args.device, torch.bfloat16).eval()
        prompts = prompts_of(self.work / "chat.npz", ids["start"], args.answers)
        made = answer_all(model, prompts, ids, batch=args.answer_batch, limit=args.answer_limit)
        save_documents(self.work / "answers.npz", *made)

    def train_draft(self) -> None:
        args = self.args
        torch.manual_seed(args.seed + 1)
        model = Qwen3(DRAFT).to(args.device)
        teacher = load(self.tiny, TINY).to(args.device)
        plan = self.plan(args.draft_tokens, 0.5, 2 * args.lr, decay=0.01)
        trainer = Trainer(model, plan, teacher)
        rows = (self.text_rows, self.answer_rows, self.valid_rows())
        train(trainer, *rows, hard=(0.2, 0.5), every=args.every)
        self.finish(model, self.draft, plan)

    def check(self) -> None:
        """Write and print bits per byte and agreement."""
        text = self.args.data / "corpora/tinystories_valid.txt"
        prompts = json.loads((self.work / "held_out.json").read_text())
        report = {
            "quire-tiny": bits_per_byte(self.tiny, text, self.args.device),
            "quire-tiny-draft": bits_per_byte(self.draft, text, self.args.device),
            "agreement": agreement(self.tiny, self.draft, prompts, self.args.device),
        }
        reference = self.args.data / "models/stories260K"
        if reference.exists():
            report["stories260K"] = bits_per_byte(reference, text, self.args.device)
        (self.work / "report.json").write_text(json.dumps(report, indent=1))
        print(json.dumps(report, indent=1))

    def stage(self, name: str) -> None:
        """Run one stage unless its result is there."""
        done = {
            "prepare": self.work / "valid.npz",
            "tiny": self.work / "quire-tiny.log.json",
            "answers": self.work / "answers.npz",
            "draft": self.work / "quire-tiny-draft.log.json",
            "check": self.work / "report.json",
        }[name]
        if done.exists():
            print(f"{name}: already there", flush=True)
            return
        print(f"{name}: starts", flush=True)
        {
            "prepare": lambda: prepare(self.args.data, self.work),
            "tiny": self.train_tiny,
            "answers": self.write_answers,
            "draft": self.train_draft,
            "check": self.check,
        }[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=160_000_000)
    parser.add_argument("--draft-tokens", type=int, default=200_000_000)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--decay", type=float, default=0.3, help="weight decay")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=CONTEXT)
    parser.add_argument("--every", type=int, default=200, help="steps between validations")
    parser.add_argument("--answers", type=int, default=16_000)
    parser.add_argument("--answer-batch", type=int, default=2048)
    parser.add_argument("--answer-limit", type=int, default=320)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    build = Build(args)
    for name in STAGES:
        if name in args.stages:
            build.stage(name)


if __name__ == "__main__":
    main()
