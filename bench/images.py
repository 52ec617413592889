"""Measures prompts with images on one GPU, with random weights.

    python bench/images.py FOLDER             # offline, by `LLM`
    python bench/images.py FOLDER --serve     # a server under load

The folder has config.json, preprocessor_config.json and the tokenizer, with a chat template, of a
Qwen3-VL model. All images are new, so nothing has cached them, unless the case says "again".
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire import LLM, SamplingParams
from quire.tools.bench.online.client import Answer
from quire.tools.bench.online.drive import Server, drive, launched, processes_for
from quire.tools.bench.record import BenchRecord, make_record
from tables import print_and_append

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>What is this?"
SIDE = 1024
WORDS = 1030
"""Words of a text prompt, about as many tokens as an image has positions."""
STREAMS = (1, 16, 64)
"""Streams that ask about images."""
BESIDE = (2, 8)
"""Streams of the other load beside streams of text."""
READERS, READ = 16, 600
"""Streams of text, and the tokens of each, whose gaps are measured."""


def picture(seed: int) -> Image.Image:
    """Returns an image of random colours."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((SIDE, SIDE))


# -- offline ---------------------------------------------------------------------------------------


def milliseconds(llm: LLM, prompts: Any, tokens: int = 1) -> float:
    """Returns the time in which prompts get `tokens` tokens each."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return 1e3 * (time.perf_counter() - began)


def about(image: Image.Image) -> dict[str, Any]:
    return {"prompt": PROMPT, "multi_modal_data": {"image": [image]}}


def offline(folder: str) -> dict[str, float]:
    """Returns the metrics of `LLM`."""
    new = map(picture, itertools.count())
    llm = LLM(folder, load_format="dummy", max_num_seqs=32, max_model_len=8192)
    for _ in range(3):
        milliseconds(llm, about(next(new)))
    before = llm.stats().images
    first = [milliseconds(llm, about(next(new))) for _ in range(8)]
    after = llm.stats().images
    image = next(new)
    milliseconds(llm, about(image))
    again = [milliseconds(llm, {**about(image), "prompt": f"{PROMPT} {i}"}) for i in range(5)]
    texts = [milliseconds(llm, " word" * WORDS + str(i)) for i in range(5)]
    many = [about(next(new)) for _ in range(32)]
    metrics = {
        "ttft_image_ms": statistics.median(first),
        "ttft_image_again_ms": statistics.median(again),
        "ttft_text_1030_ms": statistics.median(texts),
        "images_s_32": 32e3 / milliseconds(llm, many, 2),
        "encoder_ms": 1e3 * (after.encoder_seconds - before.encoder_seconds) / len(first),
    }
    llm.shutdown()
    return metrics


# -- a server --------------------------------------------------------------------------------------


def jpeg(seed: int) -> str:
    """Returns a JPEG file of a picture, in base64."""
    stream = io.BytesIO()
    picture(seed).save(stream, "JPEG", quality=85)
    return base64.b64encode(stream.getvalue()).decode()


def body(text: str, tokens: int, image: str | None = None) -> bytes:
    """Returns the body of a chat request."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        url = f"data:image/jpeg;base64,{image}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "m", "messages": messages, **sampling}).encode()


def image_bodies(tokens: int) -> Iterator[bytes]:
    """Yields bodies about new images."""
    with ThreadPoolExecutor() as threads:
        for first in itertools.count(0, 64):
            for image in threads.map(jpeg, range(first, first + 64)):
                yield body("What is this?", tokens, image)


def text_bodies(tokens: int) -> Iterator[bytes]:
    """Yields bodies with texts that are about as long as an image."""
    for seed in itertools.count():
        yield body(f"{seed}" + " word" * WORDS, tokens)


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else float("nan")


def first_times(answers: Sequence[Answer]) -> list[float]:
    """Returns the milliseconds from each request to its first token."""
    for answer in answers:
        if answer.error:
            raise SystemExit(f"a request failed: {answer.error}")
    return [1e3 * float(answer.times[0] - answer.sent) for answer in answers]


def gaps(readers: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    """Returns the milliseconds between tokens of the readers while the other load ran."""
    begin = min((answer.sent for answer in others), default=0.0)
    end = max((answer.ended for answer in others), default=np.inf)
    found: list[float] = []
    for answer in readers:
        times = answer.times[(answer.times >= begin) & (answer.times <= end)]
        found += (1e3 * np.diff(times)).tolist()
    return found


def served(folder: str, flags: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the cases of a server, each with its metrics."""
    images, texts = image_bodies(4), text_bodies(4)
    whole = (
        f"{folder} --load-format dummy --served-model-name m --max-num-seqs 96 "
        f"--max-num-batched-tokens 4096 --max-model-len 8192 {flags}"
    )
    began = time.perf_counter()
    with launched(whole) as (url, _):
        yield "start", {"start_s": time.perf_counter() - began}
        run = functools.partial(drive, f"{Server(url).base_url}/v1/chat/completions", {})

        def send(bodies: Sequence[bytes], streams: int) -> list[Answer]:
            return run(bodies, concurrency=streams, processes=processes_for(streams, None))[0]

        send(list(itertools.islice(images, 4)), 1)
        asked = list(itertools.islice(images, 8))
        first = first_times(send(asked, 1))
        again = [each.replace(b"What is this?", b"And what is that?") for each in asked]
        yield (
            "one",
            {
                "ttft_image_ms": statistics.median(first),
                "ttft_image_again_ms": statistics.median(first_times(send(again, 1))),
                "ttft_text_1030_ms": statistics.median(
                    first_times(send(list(itertools.islice(texts, 8)), 1))
                ),
            },
        )
        for streams in STREAMS:
            answers = send(list(itertools.islice(images, max(16, 2 * streams))), streams)
            times = first_times(answers)
            seconds = max(each.ended for each in answers) - min(each.sent for each in answers)
            yield (
                f"images-{streams}",
                {
                    "images_s": len(answers) / seconds,
                    "ttft_p50_ms": percentile(times, 50),
                    "ttft_p95_ms": percentile(times, 95),
                },
            )
        yield from _beside(send, images, texts)


def _beside(
    send: Any, images: Iterator[bytes], texts: Iterator[bytes]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the gaps of text streams alone, beside images, and beside texts of their length."""
    seeds = itertools.count()
    loads = [("text-alone", 0, images)]
    loads += [(f"text-beside-texts-{n}", n, texts) for n in BESIDE]
    loads += [(f"text-beside-images-{n}", n, images) for n in BESIDE]
    for name, streams, source in loads:
        others = list(itertools.islice(source, 16 * streams))
        readers = [body(f"Tell me about {next(seeds)}.", READ) for _ in range(READERS)]
        with ThreadPoolExecutor(2) as threads:
            reading = threads.submit(send, readers, READERS)
            time.sleep(0.4)  # The readers' prompts come first.
            answers = send(others, streams) if streams else []
            found = gaps(reading.result(), answers)
        metrics = {"itl_p50_ms": percentile(found, 50), "itl_p99_ms": percentile(found, 99)}
        if answers:
            seconds = max(each.ended for each in answers) - min(each.sent for each in answers)
            metrics |= {
                "others_s": len(answers) / seconds,
                "others_ttft_p50_ms": percentile(first_times(answers), 50),
            }
        yield name, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--serve", action="store_true", help="measure a server")
    parser.add_argument("--flags", default="", help="more flags of quire serve")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    args = parser.parse_args()
    record = functools.partial(make_record, model=Path(args.folder).name, device=args.device)
    settings = {"image": f"{SIDE} x {SIDE}"}
    if not args.serve:
        found = record("images_offline", offline(args.folder), settings=settings)
        print_and_append([found], args.out)
        return
    settings |= {"flags": args.flags} if args.flags else {}
    records: list[BenchRecord] = []
    for name, metrics in served(args.folder, args.flags):
        print(name, {key: round(value, 2) for key, value in metrics.items()}, flush=True)
        records.append(record(f"images_serve_{name}", metrics, settings=settings))
    print_and_append(records, args.out)


if __name__ == "__main__":
    main()
