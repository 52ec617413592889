"""Measures speculative decoding at the cost of an 8B model, with drafts accepted as on real text.

    python bench/speculation.py                    # a GPU: some three minutes
    python bench/speculation.py --small --device cpu --batches 1 --output-len 32   # anywhere
    python bench/speculation.py --model MODEL --head HEAD --prompts CHATS.jsonl    # a real model

Without `--model` the target is quire-tiny, widened (`tools/widen_model.py`) to the step cost of an
8B model. The draft is quire-tiny-draft, widened to the same vocabulary. Engines:

plain     no speculation

auto      lookup of texts, and the draft model

random    a draft model of random weights; shows the cost of useless drafts

draft, suffix, eagle3    one source; the EAGLE-3 head is widened too (`tools/widen_head.py`)

Workloads: `chat` asks for stories, greedily and at temperature 0.7. `copy` repeats a text of its
prompt, and `edit` repeats it with another name; a grammar enforces both. A number of requests run
at once to their ends, and the best of some runs counts. `vs_plain` compares the tokens per second
with `plain`. `same` is the share of requests with equal tokens. Rounding decides near ties, except
with `--deterministic`.

With `--model` the target is a model as it was published, and `--head` an EAGLE-3 head for it
(`tools/train_eagle3.py`). `chat` takes the conversations of `--prompts`; without a file, the
stories. `edit` asks for a text with another name in it, and the model writes what it likes. On a
CPU the records hold ratios and counts only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.features.speculation.stats import SpeculationStats
from quire.tools.bench.record import BenchRecord, format_table, make_record
from tables import print_and_append

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "src" / "quire" / "embedded"
sys.path.insert(0, str(ROOT / "tools"))
from widen_head import widen_head  # noqa: E402
from widen_model import Shape, widen  # noqa: E402

TARGET = Shape(hidden=5120, heads=80, kv_heads=16, layers=32, intermediate=11008, vocab=151936)
DRAFT = Shape(hidden=512, heads=2, kv_heads=1, layers=3, intermediate=256, vocab=151936)
HEAD = Shape(hidden=5120, heads=32, kv_heads=8, layers=1, intermediate=14336, vocab=151936)
SMALL_TARGET = Shape(hidden=1280, heads=8, kv_heads=4, layers=8, intermediate=704, vocab=7168)
SMALL_DRAFT = Shape(hidden=512, heads=2, kv_heads=1, layers=3, intermediate=256, vocab=7168)
SMALL_HEAD = Shape(hidden=1280, heads=4, kv_heads=2, layers=1, intermediate=128, vocab=7168)
ANIMALS = (
    "cat", "dog", "bird", "bear", "rabbit", "fish", "frog", "horse", "lion", "mouse", "monkey",
    "fox", "duck", "owl", "pig", "sheep", "cow", "bee", "snake", "turtle", "tiger", "elephant",
    "hen", "wolf", "deer", "goat", "ant", "whale", "penguin", "squirrel", "hedgehog", "kitten",
)  # fmt: skip
PLACES = "forest", "garden", "house", "river", "school", "farm", "mountain", "beach"
NAMES = "Anna", "Lucy", "Robert", "Emma", "Peter", "Maria", "Paul", "Susan"
EDITED = (
    "Tom went to the {place} in the morning. He bought six apples, a loaf of bread and a jar of "
    "honey for his mother. On the way home Tom met his friend Ben, who was sitting under an old "
    "oak tree with a {animal}. They shared the apples and talked about the summer. When the sun "
    "went down, Tom ran home and gave the honey to his mother."
)
CODE = """def total_price(items, discount):
    result = 0
    for item in items:
        if item.price > 0:
            result = result + item.price * item.count
    return result - result * discount

def mean_price(items, discount):
    count = len(items)
    if count == 0:
        return 0
    return total_price(items, discount) / count

def show_items(items):
    for item in items:
        print(item.name, item.price, item.count)
"""


Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests at once, and what they ask for."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the drafts to measure.

    Attributes:
        name: the model's name in records.
        drafts: the setting `speculative` by engine.
        conversations: messages of each request; at least as many as the largest batch.
        edits: requests for an edited text; none: a grammar enforces `copy` and `edit`.
    """

    name: str
    folder: Path
    drafts: dict[str, dict[str, Any] | None]
    conversations: list[Messages]
    edits: list[Messages] = field(default_factory=list)


def stories() -> list[Messages]:
    """Returns 256 different requests for a story about an animal in a place."""
    asked = [f"Tell me a long story about a {a} and a {p}." for p in PLACES for a in ANIMALS]
    return [[{"role": "user", "content": text}] for text in asked]


def edits() -> list[Messages]:
    """Returns 256 requests for a text with another name in it."""
    asked = [
        f"Replace Tom with {name} in this text:\n\n{EDITED.format(place=place, animal=animal)}"
        for name, place in zip(NAMES, PLACES, strict=True)
        for animal in ANIMALS
    ]
    return [[{"role": "user", "content": text}] for text in asked]


def talk(
    llm: LLM, name: str, conversations: list[Messages], temperature: float, length: int
) -> Workload:
    """Answers to conversations."""
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True) for m in conversations]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    count = len(prompts)
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, seed=i) for i in range(count)
    ]
    kind = "greedy" if temperature == 0.0 else f"t{temperature}"
    return Workload(f"{name}-{kind}-b{count}", prompts, params)


def repeated(llm: LLM, name: str, length: int) -> Workload:
    """One request that writes a text of its prompt again, `edit`: with a name changed."""
    text = CODE.replace("result", "amount") if name == "edit" else CODE
    prompt = llm.get_tokenizer().encode(f"{CODE}\n\nAgain:\n")
    params = SamplingParams(
        temperature=0.0, max_tokens=length, structured_outputs={"choice": [text]}
    )
    return Workload(f"{name}-greedy-b1", [prompt], [params])


def workloads(llm: LLM, target: Target, batches: list[int], length: int) -> list[Workload]:
    found = [
        talk(llm, "chat", target.conversations[:n], t, length) for n in batches for t in (0.0, 0.7)
    ]
    if not target.edits:
        return [*found, *(repeated(llm, name, 400) for name in ("copy", "edit"))]
    return [*found, *(talk(llm, "edit", target.edits[:n], 0.0, length) for n in batches)]


def run(llm: LLM, work: Workload, repeat: int) -> tuple[dict[str, float], list[list[int]]]:
    """Runs to the end, best of `repeat` after one to warm up; returns metrics and tokens.

    One thread of a CPU counts its own seconds, because other programs do not change them."""
    alone = llm.config.device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    best: dict[str, float] = {}
    tokens: list[list[int]] = []
    for number in range(repeat + 1):
        # No run is to find the texts of another.
        llm._core.scheduler.reset_prefix_cache()
        before, steps = counts(llm), llm.stats().steps
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        begun = clock()
        outputs = llm.generate(prompts, work.params, use_tqdm=False)
        seconds = clock() - begun
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        total = sum(map(len, tokens))
        if not number or (best and seconds >= best["seconds"]):
            continue
        taken = llm.stats().steps - steps
        best = {
            "seconds": seconds,
            "output_tokens": total,
            "output_tok_s": total / seconds,
            "steps": taken,
        }
        drafted, accepted = (after - b for after, b in zip(counts(llm), before, strict=True))
        if drafted:
            best |= {"drafted": drafted, "accepted_percent": 100.0 * accepted / drafted}
    return best, tokens


def counts(llm: LLM) -> tuple[int, int]:
    """Returns the drafts verified and accepted so far."""
    stats = llm.stats().speculation or SpeculationStats()
    sources = stats.sources.values()
    return sum(s.drafted for s in sources), sum(s.accepted for s in sources)


def randomize(source: Path, out: Path) -> None:
    """Writes a model of the same shape with random weights."""
    shutil.copytree(source, out)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name in sorted(tensors):
            tensors[name].normal_(0.0, 0.02)
        save_file(tensors, file)


def widened(args: argparse.Namespace, folder: Path) -> Target:
    """Makes the widened models, and returns the target."""
    target, draft, head = folder / "target", folder / "draft", folder / "head"
    where = args.device if torch.cuda.is_available() else "cpu"
    begun = time.perf_counter()
    for name, out, shape in (
        ("quire-tiny", target, SMALL_TARGET if args.small else TARGET),
        ("quire-tiny-draft", draft, SMALL_DRAFT if args.small else DRAFT),
    ):
        if not (out / "model.safetensors.index.json").exists():
            widen(EMBEDDED / name, out, shape, where)
    print(f"widened in {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    if not head.exists():
        shape = SMALL_HEAD if args.small else HEAD
        widen_head(EMBEDDED / "quire-tiny-eagle3", EMBEDDED / "quire-tiny", head, shape, where)
    if not (folder / "random").exists():
        randomize(draft, folder / "random")
    drafts: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "auto": {"model": str(draft)},
        "draft": {"method": "draft", "model": str(draft)},
        "suffix": {"method": "suffix"},
        "eagle3": {"method": "eagle3", "model": str(head)},
        "random": {"model": str(folder / "random")},
    }
    name = "quire-tiny, " + ("widened" if args.small else "widened to 8B")
    return Target(name, target, drafts, stories())


def published(args: argparse.Namespace) -> Target:
    """Returns a published model as the target."""
    drafts: dict[str, dict[str, Any] | None] = {"plain": None, "suffix": {"method": "suffix"}}
    if args.head is not None:
        drafts["eagle3"] = {"method": "eagle3", "model": str(args.head)}
        drafts["auto"] = {"model": str(args.head)}
    conversations = stories()
    if args.prompts is not None:
        lines = args.prompts.read_text("utf-8").splitlines()
        conversations = [json.loads(line)["messages"] for line in lines]
    return Target(args.model.name, args.model, drafts, conversations, edits())


def kept(metrics: dict[str, float], device: str) -> dict[str, float]:
    """Returns the metrics to record. Speeds of a CPU mean nothing elsewhere."""
    left_out = ("seconds", "output_tok_s") if device == "cpu" else ("seconds",)
    return {name: value for name, value in metrics.items() if name not in left_out}


def measure(args: argparse.Namespace, target: Target) -> list[BenchRecord]:
    records: list[BenchRecord] = []
    plain: dict[str, tuple[float, list[list[int]]]] = {}
    for engine in args.engines:
        begun = time.perf_counter()
        options: dict[str, Any] = {}
        if args.device != "cpu":
            options["max_num_seqs"] = max(args.batches)
        llm = LLM(
            str(target.folder),
            device=args.device,
            max_model_len=1024,
            deterministic=args.deterministic,
            speculative=target.drafts[engine],
            **options,
        )
        started = time.perf_counter() - begun
        print(f"{engine}: started in {started:.1f} s", file=sys.stderr, flush=True)
        for work in workloads(llm, target, args.batches, args.output_len):
            metrics, tokens = run(llm, work, args.repeat)
            if engine == "plain":
                plain[work.name] = metrics["output_tok_s"], tokens
            elif work.name in plain:
                rate, expected = plain[work.name]
                metrics["vs_plain"] = metrics["output_tok_s"] / rate
                same = sum(a == b for a, b in zip(tokens, expected, strict=True))
                metrics["same_percent"] = 100.0 * same / len(tokens)
            record = make_record(
                f"speculation-{engine}-{work.name}",
                kept(metrics, args.device),
                model=target.name,
                device=llm.config.device,
                settings={
                    "speculative": engine,
                    "deterministic": args.deterministic,
                },
            )
            records.append(record)
            print(format_table([record]).splitlines()[-1], file=sys.stderr, flush=True)
        if engine != "plain":
            seconds = llm._core.capacity.step_seconds
            print(f"step seconds: {seconds}", file=sys.stderr, flush=True)
        llm.shutdown()
        del llm
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engines",
        type=lambda x: x.split(","),
        help="default: plain,auto,random; with --model all of plain,suffix,eagle3,auto",
    )
    parser.add_argument("--model", type=Path, help="folder of a published model")
    parser.add_argument("--head", type=Path, help="folder of an EAGLE-3 head for --model")
    parser.add_argument("--prompts", type=Path, help="JSON Lines with `messages`, for --model")
    parser.add_argument(
        "--batches",
        type=lambda x: [int(n) for n in x.split(",")],
        default="1,8,64,256",
        help="requests at once, at most 256",
    )
    parser.add_argument("--output-len", type=int, default=192, help="most tokens of a chat answer")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="widen less, to try this anywhere")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the widened models here, for more runs")
    parser.add_argument("--out", type=Path, help="append records to this JSONL file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        target = widened(args, args.folder or Path(made)) if args.model is None else published(args)
        args.engines = args.engines or (
            ["plain", "auto", "random"] if args.model is None else list(target.drafts)
        )
        unknown = set(args.engines) - set(target.drafts)
        if unknown:
            parser.error(f"--engines: {', '.join(sorted(unknown))}: needs --head, or no --model")
        records = measure(args, target)
    print_and_append(records, args.out)


if __name__ == "__main__":
    main()
