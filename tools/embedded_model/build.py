"""Make quire-tiny, its drafts and a small hybrid from the data folder: the one command.

    python build.py --data DIR --work DIR --out DIR [--device cuda]

Stages: prepare, stories, dialogues, balance, answers, draft, head, hybrid, check. A stage whose
result is in the work or output folder already is skipped, so that a run that broke off goes on
where it was; `--stages` picks some.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from agreement import agreement
from batches import Documents, Rows, stream_rows, whole_rows
from bits_per_byte import bits_per_byte
from chat_score import score
from distillation_data import answer_all, prompts_of, save_documents
from eagle import EagleHead, HeadShape, export_head
from eagle_training import HeadTrainer, Qwen3Teacher, train_head
from hybrid import Hybrid, HybridShape, export_hybrid
from model import DRAFT, TINY, Qwen3, export, load
from prepare import CONTEXT, prepare, prepare_dialogues
from tokenizers import Tokenizer
from training import Plan, Trainer, forever, train, train_balanced

STAGES = (
    "prepare", "stories", "dialogues", "balance", "answers", "draft", "head", "hybrid", "check",
)  # fmt: skip
HYBRID_BATCH, HYBRID_LENGTH = 128, 512
SHARE = 0.6
"""Share of the later model in the mean of `train_balance`."""
HEAD_BATCH, HEAD_LENGTH = 32, 512


class Build:
    """The folders, the token ids and the sizes of one build."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.out = args, args.work, args.out
        self.tiny, self.draft = self.out / "quire-tiny", self.out / "quire-tiny-draft"
        self.head, self.hybrid = self.out / "quire-tiny-eagle3", self.work / "hybrid"
        self.stories, self.dialogues = self.work / "stories", self.work / "dialogues"
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

    def dialogue_rows(self, epoch: int, length: int | None = None) -> Rows:
        """Conversations of the last stages, whole, with only the assistant's tokens learned."""
        length = length or self.args.length
        chat = self.documents("dialogues").shorter(length)
        return whole_rows(chat, length, self.ids()["pad"], 7000 + epoch)

    def plain_rows(self, epoch: int, length: int | None = None) -> Rows:
        """Returns plain text for the same epoch, with a loss on every token."""
        ids, length = self.ids(), length or self.args.length
        plain = self.documents("plain")
        return stream_rows(plain, length, ids["pad"], ids["start"], 8000 + epoch)

    def mixed_rows(self, epoch: int, length: int | None = None) -> Rows:
        """Both."""
        parts = self.dialogue_rows(epoch, length), self.plain_rows(epoch, length)
        return tuple(torch.cat(pair) for pair in zip(*parts, strict=True))

    def answer_rows(self, epoch: int) -> Rows:
        """quire-tiny's own answers beside the conversations."""
        docs = self.documents("answers").repeated(3).joined(self.documents("dialogues"))
        return whole_rows(docs, self.args.length, self.ids()["pad"], 3000 + epoch)

    def valid_rows(self, length: int | None = None) -> Rows:
        docs, length = self.documents("valid"), length or self.args.length
        return whole_rows(docs, length, self.ids()["pad"], 0, all_tokens=True)

    def finish(self, model: Qwen3, folder: Path, plan: Plan) -> None:
        """Export with the tokenizer, and keep the log in the work folder."""
        ids = self.ids()
        export(model, folder, {"eos": ids["eos"], "pad": ids["pad"]})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(self.work / "tokenizer" / name, folder / name)
        self.log(folder, plan)

    def log(self, folder: Path, plan: Plan) -> None:
        (self.work / f"{folder.name}.log.json").write_text(json.dumps(asdict(plan), indent=1))

    def train_stories(self) -> None:
        args = self.args
        torch.manual_seed(args.seed)
        model = Qwen3(TINY, dropout=args.dropout).to(args.device)
        plan = self.plan(args.tokens, 0.12, args.lr, decay=args.decay)
        trainer = Trainer(model, plan)
        train(trainer, self.text_rows, self.chat_rows, self.valid_rows(), every=args.every)
        self.finish(model, self.stories, plan)

    def train_dialogues(self) -> None:
        """Goes on with what `train_stories` made, at half its rate."""
        args = self.args
        torch.manual_seed(args.seed + 2)
        model = load(self.stories, TINY).to(args.device)
        model.dropout = 0.2
        plan = self.plan(args.dialogue_tokens, 0, args.lr / 2, decay=args.decay, cooldown=0.9)
        rows = (self.mixed_rows, self.mixed_rows, self.valid_rows())
        train(Trainer(model, plan), *rows, every=args.every)
        self.finish(model, self.dialogues, plan)

    def train_balance(self) -> None:
        """Goes on from a mean of both (Wortsman et al. 2022), which keeps most of what either
        knows; plain text is learned from the model of before."""
        args = self.args
        torch.manual_seed(args.seed + 5)
        before, after = (load(folder, TINY) for folder in (self.stories, self.dialogues))
        model = Qwen3(TINY, dropout=0.15)
        mixed = {
            name: value.lerp(after.state_dict()[name], SHARE)
            for name, value in before.state_dict().items()
        }
        model.load_state_dict(mixed)
        plan = self.plan(args.balance_tokens, 0, 0.375 * args.lr, decay=0.1, cooldown=1.0)
        trainer = Trainer(model.to(args.device), plan, before.to(args.device))
        train_balanced(trainer, self.dialogue_rows, self.plain_rows, every=args.every)
        self.finish(model, self.tiny, plan)

    def write_answers(self) -> None:
        ids, args = self.ids(), self.args
        model = load(self.tiny, TINY).to(args.device, torch.bfloat16).eval()
        prompts = prompts_of(self.work / "dialogues.npz", ids["start"], args.answers)
        made = answer_all(model, prompts, ids, batch=args.answer_batch, limit=args.answer_limit)
        save_documents(self.work / "answers.npz", *made)

    def train_draft(self) -> None:
        args = self.args
        torch.manual_seed(args.seed + 1)
        model = Qwen3(DRAFT).to(args.device)
        teacher = load(self.tiny, TINY).to(args.device)
        plan = self.plan(args.draft_tokens, 0.5, 2 * args.lr, decay=0.01)
        trainer = Trainer(model, plan, teacher)
        rows = (self.mixed_rows, self.answer_rows, self.valid_rows())
        train(trainer, *rows, hard=(0.2, 0.5), every=args.every)
        self.finish(model, self.draft, plan)

    def train_head(self) -> None:
        args, ids = self.args, self.ids()
        torch.manual_seed(args.seed + 3)
        model = load(self.tiny, TINY).to(args.device)
        head = EagleHead(TINY, HeadShape()).to(args.device)
        steps = max(args.head_tokens // (HEAD_BATCH * HEAD_LENGTH), 4)
        plan = Plan(steps, 0, HEAD_BATCH, HEAD_LENGTH, args.lr, decay=0.05, cooldown=0.6)
        docs = self.documents("answers").repeated(4).joined(self.documents("dialogues"))
        docs = docs.shorter(HEAD_LENGTH)
        feed = forever(lambda e: whole_rows(docs, HEAD_LENGTH, ids["pad"], 9000 + e), HEAD_BATCH)
        teacher, weight = Qwen3Teacher(model, head.s.taps), model.embed_tokens.weight
        train_head(HeadTrainer(head, teacher, plan, weight), feed, every=args.every)
        export_head(head, self.head)
        self.log(self.head, plan)

    def train_hybrid(self) -> None:
        """Trains the hybrid of lesson 12, which speaks quire-tiny's tokens."""
        args = self.args
        torch.manual_seed(args.seed + 4)
        model = Hybrid(HybridShape()).to(args.device)
        steps = max(args.hybrid_tokens // (HYBRID_BATCH * HYBRID_LENGTH), 4)
        plan = Plan(steps, 0, HYBRID_BATCH, HYBRID_LENGTH, args.lr, decay=0.1, cooldown=0.4)
        feed = functools.partial(self.mixed_rows, length=HYBRID_LENGTH)
        train(Trainer(model, plan), feed, feed, self.valid_rows(HYBRID_LENGTH), every=args.every)
        export_hybrid(model, self.hybrid, self.ids())
        self.log(self.hybrid, plan)

    def check(self) -> None:
        """Write and print bits per byte, agreement and the forty prompts."""
        text = self.args.data / "corpora/tinystories_valid.txt"
        prompts = json.loads((self.work / "held_out.json").read_text())
        report = {
            "quire-tiny": bits_per_byte(self.tiny, text, self.args.device),
            "quire-tiny-draft": bits_per_byte(self.draft, text, self.args.device),
            "agreement": agreement(self.tiny, self.draft, prompts, self.args.device),
        }
        tokenizer = Tokenizer.from_file(str(self.tiny / "tokenizer.json"))
        model = load(self.tiny, TINY).to(self.args.device).eval()
        report["prompts"] = {"passed": sum(passed for *_, passed in score(model, tokenizer))}
        reference = self.args.data / "models/stories260K"
        if reference.exists():
            report["stories260K"] = bits_per_byte(reference, text, self.args.device)
        (self.work / "report.json").write_text(json.dumps(report, indent=1))
        print(json.dumps(report, indent=1))

    def prepare(self) -> None:
        prepare(self.args.data, self.work)
        tokenizer = Tokenizer.from_file(str(self.work / "tokenizer/tokenizer.json"))
        prepare_dialogues(self.args.data, self.work, tokenizer)

    def stage(self, name: str) -> None:
        """Run one stage unless its result is there."""
        done = {
            "prepare": self.work / "plain.npz",
            "stories": self.work / "stories.log.json",
            "dialogues": self.work / "dialogues.log.json",
            "balance": self.work / "quire-tiny.log.json",
            "answers": self.work / "answers.npz",
            "draft": self.work / "quire-tiny-draft.log.json",
            "head": self.work / "quire-tiny-eagle3.log.json",
            "hybrid": self.work / "hybrid.log.json",
            "check": self.work / "report.json",
        }[name]
        if done.exists():
            print(f"{name}: already there", flush=True)
            return
        print(f"{name}: starts", flush=True)
        {
            "prepare": self.prepare,
            "stories": self.train_stories,
            "dialogues": self.train_dialogues,
            "balance": self.train_balance,
            "answers": self.write_answers,
            "draft": self.train_draft,
            "head": self.train_head,
            "hybrid": self.train_hybrid,
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
    parser.add_argument("--dialogue-tokens", type=int, default=160_000_000)
    parser.add_argument("--balance-tokens", type=int, default=100_000_000)
    parser.add_argument("--head-tokens", type=int, default=50_000_000)
    parser.add_argument("--hybrid-tokens", type=int, default=200_000_000)
    parser.add_argument("--draft-tokens", type=int, default=200_000_000)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--decay", type=float, default=0.3, help="weight decay")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=CONTEXT)
    parser.add_argument("--every", type=int, default=200, help="steps between validations")
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--answer-batch", type=int, default=4096)
    parser.add_argument("--answer-limit", type=int, default=220)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    build = Build(args)
    for name in STAGES:
        if name in args.stages:
            build.stage(name)


if __name__ == "__main__":
    main()
