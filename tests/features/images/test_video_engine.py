"""Videos in the engine: logits and tokens must be those of transformers."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.features.images.preparation import prepare
from quire.features.images.processor import ImageGrid, ImageProcessor
from quire.features.images.videos import VideoSettings
from quire.models.config import load_config
from tests.features.images.checkpoints import TOKENS, save_checkpoint
from tests.slow import slow

BEGIN, END = TOKENS["vision_start_token_id"], TOKENS["vision_end_token_id"]
IMAGE, VIDEO = TOKENS["image_token_id"], TOKENS["video_token_id"]
COUNT = 12
GREEDY = SamplingParams(
    max_tokens=COUNT, temperature=0.0, ignore_eos=True, allowed_token_ids=tuple(range(99))
)
TEXT = list(range(10, 25))


def pictures(seed: int, count: int, width: int, height: int) -> list[Image.Image]:
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in values]


CLIP, LONG = pictures(1, 5, 41, 26), pictures(2, 9, 20, 50)
(PICTURE,) = pictures(3, 1, 37, 29)


class Oracle:
    """A tiny model of transformers, which sees images and videos that are prepared here.

    transformers resizes frames by torchvision, which is not compared.
    """

    def __init__(self, case: str, folder: Path) -> None:
        self.folder = folder
        self._model = save_checkpoint(case, folder)
        self._processor = ImageProcessor.from_folder(folder, load_config(folder))
        self._settings = VideoSettings.from_folder(folder, self._processor.settings)
        self._llm: LLM | None = None

    @torch.inference_mode()
    def tokens(self, parts: list[Any], encode: Any) -> list[int]:
        """Returns the greedy continuation of texts (lists of ids), images, and videos (pairs of
        frames and frames a second)."""
        ids: list[int] = []
        pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
        grids: dict[str, list[list[int]]] = {"image": [], "video": []}
        for part in parts:
            if isinstance(part, list):
                ids += part
            elif isinstance(part, Image.Image):
                grid = self._processor.size(part.width, part.height)
                pixels["image"].append(self._patches([part], grid))
                grids["image"].append([1, grid.h, grid.w])
                ids += [BEGIN, *[IMAGE] * grid.tokens, END]
            else:
                frames, fps = part
                ids += self._see(frames, fps, pixels["video"], grids["video"], encode)
        inputs: dict[str, torch.Tensor] = {}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels[kind]:
                inputs[name] = torch.cat(pixels[kind])
                inputs[f"{kind}_grid_thw"] = torch.tensor(grids[kind])
        length = len(ids)
        while len(ids) < length + COUNT:
            given = torch.tensor([ids])
            kinds = (given == IMAGE).int() + 2 * (given == VIDEO).int()
            logits = self._model(input_ids=given, mm_token_type_ids=kinds, **inputs).logits
            ids.append(int(logits[0, -1, :99].argmax()))
        return ids[length:]

    def _see(
        self, frames: Any, fps: float, pixels: list[Any], grids: list[Any], encode: Any
    ) -> list[int]:
        rows, columns = self._settings.size(len(frames), *frames[0].size)
        grid = ImageGrid(2, 2 * rows, 2 * columns, rows * columns)
        frames = [*frames, *frames[-1:] * (len(frames) % 2)]
        ids: list[int] = []
        for first in range(0, len(frames), 2):
            pixels.append(self._patches(frames[first : first + 2], grid))
            last = min(first + 1, len(frames) - 1)
            if frames[first] is frames[last]:
                last = first  # The last frame is repeated.
            ids += encode(f"<{(first / fps + last / fps) / 2:.1f} seconds>")
            ids += [BEGIN, *[VIDEO] * grid.tokens, END]
        grids.append([len(frames) // 2, grid.h, grid.w])
        return ids

    def _patches(self, frames: list[Image.Image], grid: ImageGrid) -> torch.Tensor:
        stacked = torch.from_numpy(np.concatenate([np.asarray(each) for each in frames]))
        return prepare(stacked, grid, self._processor.settings)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Oracle] = {}

    def get(case: str) -> Oracle:
        if case not in made:
            made[case] = Oracle(case, tmp_path_factory.mktemp(case.replace(".", "_")))
        return made[case]

    return get


def prompt(parts: list[Any]) -> dict[str, Any]:
    ids: list[int] = []
    data: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, list):
            ids += part
        elif isinstance(part, Image.Image):
            ids += [BEGIN, IMAGE, END]
            data.setdefault("image", []).append(part)
        else:
            ids += [BEGIN, VIDEO, END]
            data.setdefault("video", []).append((part[0], {"fps": part[1]}))
    return {"prompt_token_ids": ids, "multi_modal_data": data}


def tokens(llm: LLM, *prompts: Any) -> list[list[int]]:
    found = llm.generate(list(prompts), GREEDY, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


MIXED = [
    [TEXT, (CLIP, 2.0), TEXT[:4]],
    [TEXT[:3], PICTURE, [40, 41], (LONG, 1.0), [42], (CLIP, 2.0), TEXT[:2]],
]


@pytest.mark.parametrize("case", ["qwen3-vl", slow("qwen3-vl-moe"), "qwen3.5", slow("qwen3.5-moe")])
def test_the_tokens_of_transformers(case: str, oracles: Any, llms: Any) -> None:
    """One video, and images and videos in turn, also in chunks and from the prefix cache."""
    oracle = oracles(case)
    llm = llms(oracle.folder, max_num_batched_tokens=40)

    def encode(text: str) -> list[int]:
        return llm.get_tokenizer().encode(text, add_special_tokens=False).tolist()

    expected = [oracle.tokens(parts, encode) for parts in MIXED]
    prompts = [prompt(parts) for parts in MIXED]
    assert tokens(llm, *prompts) == expected
    assert tokens(llm, *prompts) == expected
    assert llm.stats().images.images == 2 * (3 + 1 + 5 + 3)
    # Two ranks read the frames from memory that both share.
    if case == "qwen3-vl":
        ranks = llms(oracle.folder, tensor_parallel_size=2)
        assert tokens(ranks, *prompts) == expected


def test_forms_of_a_video(oracles: Any, llms: Any) -> None:
    """A list of frames, an array, a file and a data URI of equal frames give equal answers."""
    llm = llms(oracles("qwen3-vl").folder)
    stream = io.BytesIO()
    first, *rest = CLIP
    first.save(stream, "PNG", save_all=True, append_images=rest, duration=1000)
    files = []
    for frame in CLIP:
        one = io.BytesIO()
        frame.save(one, "PNG")
        files.append(base64.b64encode(one.getvalue()).decode())
    jpegs = f"data:video/jpeg;base64,{','.join(files)}"
    ids = [*TEXT, BEGIN, VIDEO, END, 30]
    forms: list[Any] = [
        CLIP,
        [CLIP],
        np.stack([np.asarray(each) for each in CLIP]),
        (CLIP, {"fps": 1.0}),
        stream.getvalue(),
        f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}",
        jpegs,
    ]
    asked = [{"prompt_token_ids": ids, "multi_modal_data": {"video": each}} for each in forms]
    found = tokens(llm, *asked)
    assert found == [found[0]] * len(forms)
    content = [
        {"type": "video_url", "video_url": {"url": jpegs}},
        {"type": "text", "text": "cd"},
    ]
    (chat,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    text = "<user><|vision_start|><|video_pad|><|vision_end|>cd<assistant>"
    own = llm.get_tokenizer().encode(text, add_special_tokens=False).tolist()
    same = {"prompt_token_ids": own, "multi_modal_data": {"video": CLIP}}
    assert tokens(llm, same) == [list(chat.outputs[0].token_ids)]


def test_refusals(oracles: Any, llms: Any) -> None:
    folder = oracles("qwen3-vl").folder
    llm = llms(folder, max_images=4, max_videos=1, max_video_frames=9, max_video_bytes=1000)
    ids = [*TEXT, BEGIN, VIDEO, END, 30]

    def ask(video: Any, prompt_ids: list[int] = ids) -> None:
        tokens(llm, {"prompt_token_ids": prompt_ids, "multi_modal_data": {"video": video}})

    for video, why in (
        ([CLIP, CLIP], "--max-videos"),
        (LONG, "--max-images"),
        (pictures(4, 10, 20, 20), "--max-video-frames"),
        (bytes(1001), "--max-video-bytes|no video"),
        (f"data:video/mp4;base64,{'A' * 2000}", "--max-video-bytes"),
        ("data:video/mp4,xx", "data:video/mp4;base64"),
        (7, "int is no video"),
        (pictures(5, 1, 20, 20), "at least 2"),
    ):
        with pytest.raises(RequestError, match=why):
            ask(video)
    with pytest.raises(RequestError, match="places for 0 videos"):
        ask(CLIP, TEXT)
    blind = llms(folder, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip-tokenizer-init"):
        blind.generate(
            {"prompt_token_ids": ids, "multi_modal_data": {"video": CLIP}}, use_tqdm=False
        )


def test_qwen2_5_takes_no_videos(oracles: Any, llms: Any) -> None:
    llm = llms(oracles("qwen2.5-vl").folder)
    with pytest.raises(RequestError, match="counts seconds in rotary positions"):
        tokens(llm, {"prompt_token_ids": [*TEXT, VIDEO, 3], "multi_modal_data": {"video": CLIP}})
