"""Models in GGUF files: numbers, order of heads, settings, tokenizers, and refused files."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.models import load_config, resolve_model_path
from quire.models.gguf import GgufFile, open_model
from quire.text.gguf_tokenizer import tokenizer_files
from tests.models.checkpoints import LLAMA3, SIZES, greedy
from tests.models.test_parallel import Ranked
from tests.models.test_quantized_checkpoints import PROMPT, loaded, logits, projections

gguf = pytest.importorskip("gguf")

WIDE: dict[str, Any] = {
    **SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
EXACT = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "MXFP4", "Q6_K", "Q3_K", "IQ4_NL", "IQ4_XS")
ROUNDED = ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K")
FLOATS = ("IQ3_S", "TQ2_0")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def quantized(weight: np.ndarray[Any, Any], kind: str, seed: int) -> np.ndarray[Any, Any]:
    """Returns a weight as stored in a file. For types that the library cannot quantize, it draws
    random blocks, with scales that give weights of the same size."""
    type = gguf.GGMLQuantizationType[kind]
    with contextlib.suppress(NotImplementedError):
        return gguf.quantize(weight, type)
    each, size = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (len(weight), weight.shape[1] // each, size), dtype=np.uint8)
    place, scale = {
        "Q6_K": (208, 3e-5), "Q3_K": (108, 1e-3), "IQ4_NL": (0, 1e-3), "IQ4_XS": (0, 4e-5),
        "IQ3_S": (0, 5e-4), "Q5_K": (0, 1e-4), "Q4_K": (0, 2e-4), "Q2_K": (80, 3e-3),
    }[kind]  # fmt: skip
    halves = (scale * rng.uniform(0.5, 1.5, (*blocks.shape[:2], 2))).astype(np.float16)
    if kind not in ROUNDED:
        halves[..., 0] *= rng.choice([-1, 1], blocks.shape[:2])
        blocks[..., place : place + 2] = halves[..., :1].view(np.uint8)
    elif kind == "Q2_K":
        halves[..., 1] = halves[..., 0] * 1.5
        blocks[..., :16] = (blocks[..., :16] & 15) * 17
        blocks[..., 80:] = halves.view(np.uint8)
    else:
        # The mean of a group's weights is near 0: its minimum is half of its range. The integers of
        # 6 bits that multiply steps and minima are the same, in each of their three places.
        halves[..., 1] = halves[..., 0] * {"Q5_K": 15.7, "Q4_K": 7.3}[kind]
        blocks[..., :4] = halves.view(np.uint8)
        blocks[..., 8:12] = blocks[..., 4:8]
        blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17
    return blocks.reshape(len(weight), -1)


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Interleaves the two halves of each head's rows, as converters to GGUF do for llama."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path, kind: str, name: str = "llama", *, drop: tuple[str, ...] = (), **changes: Any
) -> Any:
    """Writes a model of random weights; returns transformers' model with the file's weights. drop:
    settings to omit."""
    import transformers

    more = {"head_dim": 64} if name == "qwen3" else {}
    config = getattr(transformers, f"{name.capitalize()}Config")(**{**WIDE, **more, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.capitalize()}ForCausalLM")(config).eval()
    writer = gguf.GGUFWriter(path, name)
    settings = {
        "context_length": (writer.add_context_length, 256),
        "embedding_length": (writer.add_embedding_length, config.hidden_size),
        "block_count": (writer.add_block_count, config.num_hidden_layers),
        "feed_forward_length": (writer.add_feed_forward_length, config.intermediate_size),
        "head_count": (writer.add_head_count, config.num_attention_heads),
        "head_count_kv": (writer.add_head_count_kv, config.num_key_value_heads),
        "eps": (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        "theta": (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
        "key_length": (writer.add_key_length, 64),
    }
    for key, (add, value) in settings.items():
        if key not in drop:
            add(value)
    if config.rope_parameters["rope_type"] == "llama3":
        base = 10000.0 if "rope_theta" not in config.rope_parameters else None
        theta = base or config.rope_parameters["rope_theta"]
        plain = 1.0 / theta ** (torch.arange(0, 64, 2) / 64)
        scaled = model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    with torch.no_grad():
        for seed, (key, parameter) in enumerate(model.named_parameters()):
            stem, _, tensor = key.rpartition(".")
            if stem in OUTER:
                stored = OUTER[stem]
            else:
                index, _, inner = stem.removeprefix("model.layers.").partition(".")
                stored = f"blk.{index}.{NAMES[inner]}"
            own = parameter.numpy()
            count = heads.get(stored.rpartition(".")[2], 0) if name == "llama" else 0
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
                writer.add_tensor(f"{stored}.{tensor}", permuted(own, count) if count else own)
                continue
            parameter.normal_(0, 1.2 * parameter.shape[1] ** -0.5)
            raw = quantized(permuted(own, count) if count else own, kind, seed)
            type = gguf.GGMLQuantizationType[kind]
            exact = gguf.dequantize(raw, type)
            parameter.copy_(torch.from_numpy(unpermuted(exact, count) if count else exact))
            if kind in ("F32", "F16"):
                writer.add_tensor(f"{stored}.{tensor}", raw)
            else:
                writer.add_tensor(f"{stored}.{tensor}", raw, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(("kind", "name"), [
    *((kind, "llama") for kind in (*EXACT, *ROUNDED, *FLOATS)),
    ("Q8_0", "qwen2"), ("Q4_K", "qwen3"),
])  # fmt: skip
def test_logits_are_transformers(kind: str, name: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "x.gguf", kind, name)
    model = loaded(resolve_model_path(str(tmp_path / "x.gguf")))
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    error = (logits(model) - expected).norm() / expected.norm()
    assert error < (2e-2 if kind in ROUNDED else 1e-5)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q8_0"])
def test_dequantized_weights_are_exact(kind: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "x.gguf", kind)
    model = loaded(resolve_model_path(str(tmp_path / "x.gguf")), wanted="float")
    assert {w.format.values for _, layer, _ in projections(model) for w in layer.weights} == {
        torch.float32
    }
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits(model) - expected).norm() / expected.norm() < 1e-5


def test_a_format_to_dequantize_may_be_a_float(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", "F16")
    loaded(resolve_model_path(str(tmp_path / "x.gguf")), wanted="float")


@pytest.mark.parametrize(("kind", "world"), [
    *((kind, 2) for kind in ("Q8_0", "Q4_0", "Q6_K", "Q4_K", "Q5_K", "Q5_0", "IQ4_XS", "Q2_K")),
    ("Q8_0", 1), ("Q4_K", 1),
])  # fmt: skip
def test_weights_are_those_of_the_library(kind: str, world: int, tmp_path: Path) -> None:
    oracle = dict(write(tmp_path / "x.gguf", kind).named_parameters())
    folder = resolve_model_path(str(tmp_path / "x.gguf"))
    for rank in range(world):
        for name, layer, own in projections(loaded(folder, Ranked(rank, world))):
            exact = oracle[name].detach().double().chunk(world, int(layer.split == "inputs"))[rank]
            size = 16 if kind == "Q2_K" else 32
            groups = exact.unflatten(1, (-1, size))
            # The step of 8 bits in a group.
            span = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
            step = 0 if kind in EXACT else (span / 255).unsqueeze(2)
            assert ((own.unflatten(1, (-1, size)) - groups).abs() <= step * 1.02 + 1e-7).all()
            assert layer.weights[0].format.values in (torch.int8, torch.uint8)


@pytest.mark.parametrize("changes", [
    {"tie_word_embeddings": True},
    {"attention_bias": True},
    {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192, "factor": 32.0}},
])  # fmt: skip
def test_variants_of_llama(changes: dict[str, Any], tmp_path: Path) -> None:
    oracle = write(tmp_path / "x.gguf", "Q8_0", **changes)
    model = loaded(resolve_model_path(str(tmp_path / "x.gguf")))
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits(model) - expected).norm() / expected.norm() < 2e-3


def test_generation(tmp_path: Path) -> None:
    oracle = write(tmp_path / "x.gguf", "Q8_0", "qwen3")
    llm = LLM(
        str(tmp_path / "x.gguf"), device="cpu", kv_cache_gb=0.05, max_num_seqs=4,
        skip_tokenizer_init=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy(oracle, PROMPT, 8)
    llm.shutdown()


def test_the_folder_is_created_once_per_content(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write(path, "Q8_0")
    first = resolve_model_path(str(path))
    assert resolve_model_path(str(path)) == first
    path.unlink()
    write(path, "Q4_0")
    assert resolve_model_path(str(path)) != first
    types = json.loads((resolve_model_path(str(path)) / "config.json").read_text())
    assert set(types["quantization_config"]["types"].values()) == {"Q4_0"}


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    write(path, "F16")
    found = dict(gguf.GGUFReader(path).fields)["general.architecture"]
    assert found.contents() == "llama"
    content = path.read_bytes()
    # The type of a matrix becomes an unknown one.
    at = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    path.write_bytes(content[:at] + bytes([27]) + content[at + 1 :])
    with pytest.raises(ModelError, match=r"layers\.0\.attention\.qkv\.q\.weight has the type I64"):
        resolve_model_path(str(path))
    path.unlink()
    write(path, "F16", drop=("eps",))
    with pytest.raises(ModelError, match=r"no llama\.attention\.layer_norm_rms_epsilon"):
        resolve_model_path(str(path))
    path.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match="cannot read"):
        resolve_model_path(str(path))
    other = tmp_path / "model.bin"
    other.write_bytes(b"abc")
    with pytest.raises(ModelError, match="is a file; a model is a folder"):
        resolve_model_path(str(other))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[gguf\]' in a checkout"):
        resolve_model_path(str(path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("llama.block_count", [2, 3], r"block_count must be an integer above 0, got \[2, 3\]"),
        ("llama.attention.head_count", 0, "llama.attention.head_count must be an integer above 0"),
        ("llama.rope.freq_base", "x", "llama.rope.freq_base must be a number above 0, got x"),
        ("llama.rope.scaling.type", "linear", "the file has no llama.rope.scaling.factor"),
        ("split.count", 3, "the file is one of 3 parts of its model; merge them"),
        ("tokenizer.ggml.model", "gpt2", "the file's tokenizer is invalid: KeyError"),
    ],
)
def test_invalid_settings_are_refused(
    name: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.gguf"
    write(path, "F16")
    read = GgufFile.__init__

    def changed(self: GgufFile, path: Path) -> None:
        read(self, path)
        self.fields[name] = value

    monkeypatch.setattr(GgufFile, "__init__", changed)
    with pytest.raises(ModelError, match=message):
        resolve_model_path(str(path))
    assert not list((tmp_path / "cache").glob("gguf/*"))


@pytest.mark.parametrize("name", ["scaling.factor", "scale_linear"])
def test_a_factor_without_a_type_scales_positions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the model gets linear scaling, as in llama.cpp."""
    write(tmp_path / "x.gguf", "F16")
    read = GgufFile.__init__

    def changed(self: GgufFile, path: Path) -> None:
        read(self, path)
        self.fields[f"llama.rope.{name}"] = 4.0

    monkeypatch.setattr(GgufFile, "__init__", changed)
    config = load_config(resolve_model_path(str(tmp_path / "x.gguf")))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_file_without_a_model(tmp_path: Path) -> None:
    """Refuses an adapter, as llama.cpp's converter makes it."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"the file has no token_embd\.weight"):
        resolve_model_path(str(tmp_path / "x.gguf"))


def test_an_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_embedding_length(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture mamba are not supported"):
        resolve_model_path(str(tmp_path / "x.gguf"))


TEXTS = [
    "Once upon a time, there was a dog named Tim.",
    "It's 12345 o'clock;  they've said\n\n\"no\" to   naïve ünïcödé 你好 🙂!",
    "<|im_start|>user\nhi<|im_end|>",
    "   leading and trailing   ",
]


def _fields(hub: HubTokenizer, **more: Any) -> dict[str, Any]:
    """Returns a file's settings for a tokenizer."""
    vocab = sorted(hub.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in vocab]
    special = {token.content for token in hub.get_added_tokens_decoder().values() if token.special}
    model = json.loads(hub.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        **more,
    }


def _built(files: dict[str, Any]) -> HubTokenizer:
    return HubTokenizer.from_str(json.dumps(files["tokenizer.json"]))


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_byte_level_tokenizers(pre: str) -> None:
    patterns = {
        "qwen2": r"\p{N}",
        "llama-bpe": r"\p{N}{1,3}",
    }
    hub = HubTokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "gpt-2":
        hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        hub.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])  # fmt: skip
    else:
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + patterns[pre]
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )  # fmt: skip
        hub.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    hub.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    hub.train_from_iterator(TEXTS * 3, trainer)
    hub.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    end = hub.token_to_id("<|im_end|>")
    fields = _fields(
        hub,
        **{
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.eos_token_id": end,
            "tokenizer.chat_template": "{{ messages }}",
        },
    )
    files = tokenizer_files(fields)
    own = _built(files)
    for text in TEXTS:
        assert own.encode(text).ids == hub.encode(text).ids
        assert own.decode(own.encode(text).ids) == hub.decode(hub.encode(text).ids)
    assert files["generation_config.json"] == {"eos_token_id": [end]}
    assert files["tokenizer_config.json"]["eos_token"] == "<|im_end|>"
    assert files["tokenizer_config.json"]["chat_template"] == "{{ messages }}"
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'mine'"):
        tokenizer_files({**fields, "tokenizer.ggml.pre": "mine"})
    # As llama.cpp begins texts if a file does not specify it.
    begins = {**fields, "tokenizer.ggml.bos_token_id": 0}
    assert (_built(tokenizer_files(begins)).encode("a").ids[0] == 0) == (pre == "llama-bpe")
    unbegun = tokenizer_files({**begins, "tokenizer.ggml.add_bos_token": False})
    assert _built(unbegun).encode("a").ids == hub.encode("a").ids


def test_sentencepiece_tokenizers() -> None:
    """The pieces of a BPE model in the order of their merges, which is that of the scores."""
    hub = HubTokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    hub.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    hub.train_from_iterator(["Once upon a time there was a little dog, and a cat."] * 3, trainer)
    vocab = sorted(hub.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in vocab]
    first = len(specials) + len({token for token in tokens[len(specials) :] if len(token) == 1})
    scores = [0.0 if i < first else -float(i - first) for i in range(len(tokens))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - len(specials))]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    own = _built(tokenizer_files(fields))
    for text in ("Once upon a time", "a cat and 你", "dogs  dog"):
        ids = own.encode(text).ids
        assert ids[0] == 1
        assert own.decode(ids) == text
        assert ids[1:] == hub.encode(text).ids or "你" in text
    with pytest.raises(ModelError, match="'bert'"):
        tokenizer_files({**fields, "tokenizer.ggml.model": "bert"})


def test_a_table_of_tokens_is_dequantized(tmp_path: Path) -> None:
    oracle = write(tmp_path / "x.gguf", "Q8_0")
    file = open_model(tmp_path / "x.gguf")
    whole = file.get_tensor("embedding.weight")
    assert torch.equal(whole, oracle.model.embed_tokens.weight)
    part = file.get_slice("embedding.weight")[(slice(3, 9), slice(0, 256))]
    assert torch.equal(part, whole[3:9])


def test_formats_and_sizes_of_loaded_weights_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes of each format add up to those of the model."""
    write(tmp_path / "x.gguf", "Q4_0")
    caplog.set_level("INFO")
    model = loaded(resolve_model_path(str(tmp_path / "x.gguf")))
    (told,) = [r.getMessage() for r in caplog.records if "GGUF tensors" in r.getMessage()]
    assert told.startswith("GGUF tensors: 16 Q4_0, 5 F32; on the device ")
    sizes = [float(size) for size in re.findall(r"([\d.]+) MB", told)]
    assert sizes[0] == pytest.approx(sum(sizes[1:]), abs=0.2)
    assert sizes[0] == pytest.approx(sum(p.nbytes for p in model.parameters()) / 1e6, abs=0.1)
    assert "uint4-g32" in told
