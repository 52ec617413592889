"""Templates render as in `transformers`, and cannot do harm."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from quire.errors import ModelError, RequestError
from quire.models import resolve_model_path
from quire.text.chat_template import ChatTemplate, load_templates
from quire.text.tokenizer import Tokenizer, eos_token_ids

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": 'Quotes " and <tags> & é 漢'},
        {"role": "assistant", "content": " spaces "},
        {"role": "user", "content": ""},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add", [True, False])
def test_embedded_template_equals_transformers(messages: list[dict[str, str]], add: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = resolve_model_path(None)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    want = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=add) == want
    ids = tokenizer.encode(want, add_special_tokens=False).tolist()
    assert ids == oracle(want, add_special_tokens=False)["input_ids"]


def test_filters_and_statements() -> None:
    source = (
        "{%- for m in messages %}\n"
        "  {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% generation %}[{{ m.content }}]{% endgeneration %}\n"
        "{%- endfor %}{{ tools is none }}{{ strftime_now('%Y') | length }}"
    )
    text = ChatTemplate(source).render([{"role": "user", "content": "<é>"}] * 5)
    assert '{"role": "user", "content": "<é>"}[<é>]' in text
    assert text.count("[<é>]") == 2
    assert text.endswith("True4")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "failed|refused"),
        ("{{ 1 + 'a' }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{% for i in range(10**9) %}x{% endfor %}", "too big"),
    ],
)
def test_forbidden_template_operations_are_refused(source: str, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (LOOPS.replace("BODY", ""), "too long"),
        (LOOPS.replace("BODY", "{% if j < 0 %}x{% endif %}"), "too long"),
        (LOOPS.replace("BODY", "x"), "too long"),
        ("{{ 'x' * 10**10 }}", "too large"),
        ("{% set x = 10**10 * ['x'] %}", "too large"),
        ("{{ 9 ** (9 ** 9) }}", "exponent"),
    ],
)
def test_a_template_can_take_neither_all_time_nor_all_memory(source: str, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        ChatTemplate(source, seconds=0.1).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}"
        "{% set x = loop.index %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for a in messages %}{{ f(n + 1) }}{% endfor %}{% endmacro %}{{ f(0) }}",
    ],
)
def test_long_loops_over_messages_are_stopped_in_time(source: str) -> None:
    messages = [{"role": "user", "content": "x"}] * 2000
    with pytest.raises(RequestError, match=r"too long|recursion"):
        ChatTemplate(source, seconds=0.1).render(messages)


def test_repeated_concatenation_is_limited() -> None:
    source = (
        "{% set ns = namespace(x='xxxxxxxxxxxxxxxx') %}"
        "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="too large"):
        ChatTemplate(source).render([])


def test_reasoning_has_two_names() -> None:
    source = "{{ messages[0].thinking }}{{ messages[0].reasoning_content }}"
    message = {"role": "assistant", "content": "", "reasoning_content": "a"}
    assert ChatTemplate(source).render([message]) == "aa"


def test_variables_are_those_the_template_reads() -> None:
    source = "{% if enable_thinking %}{% set x = documents %}{% endif %}{{ messages }}"
    assert {"enable_thinking", "documents"} <= ChatTemplate(source).variables
    assert "reasoning_effort" not in ChatTemplate(source).variables


def test_arithmetic_works() -> None:
    text = ChatTemplate("{{ 3 * 4 }} {{ 2 ** 10 }} {{ '=' * 5 }} {{ 1.5 * 2 }}").render([])
    assert text == "12 1024 ===== 3.0"


def test_broken_templates_are_named() -> None:
    with pytest.raises(RequestError, match="not valid"):
        ChatTemplate("{% if %}")
    with pytest.raises(RequestError, match="too large"):
        ChatTemplate("x" * 1_000_001)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load_templates(tmp_path, {"chat_template": "C"}) == {"default": "C"}
    assert load_templates(tmp_path, {"chat_template": named}) == {"default": "D", "tool_use": "T"}
    assert load_templates(tmp_path, {}) == {}
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_templates(tmp_path, {"chat_template": "C"}) == {"default": "F"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    assert load_templates(tmp_path, {}) == {"default": "F", "tool_use": "A"}


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize(
    ("config", "built"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": True}, False),
        ({"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": True}, False),
        ({"eos_token": "<|im_end|>"}, True),
        ({}, True),
    ],
)
def test_the_end_of_sequence_is_read_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], built: bool
) -> None:
    embedded = resolve_model_path(None)
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "tokenizer.json").write_bytes((embedded / "tokenizer.json").read_bytes())
    full = json.loads((embedded / "tokenizer_config.json").read_text())
    if "added_tokens_decoder" in config:
        config = {**config, "added_tokens_decoder": full["added_tokens_decoder"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    want = Tokenizer.from_path(tmp_path).eos_token_ids
    assert len(want) == ("eos_token" in config)
    calls = []
    build = Tokenizer.from_path
    monkeypatch.setattr(Tokenizer, "from_path", lambda path: calls.append(path) or build(path))
    assert eos_token_ids(tmp_path) == want
    assert bool(calls) == built


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    embedded = resolve_model_path(None)
    (tmp_path / "tokenizer.json").write_bytes((embedded / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    tokenizer = Tokenizer.from_path(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(CONVERSATIONS[0])
    assert tokenizer.apply_chat_template(CONVERSATIONS[0], chat_template="{{ messages[0].role }}")


def test_token_bytes_join_to_the_text() -> None:
    tokenizer = Tokenizer.from_path(resolve_model_path(None))
    text = "héllo 😀 <think>ok"
    ids = tokenizer.encode(text).tolist()
    assert b"".join(tokenizer.token_bytes(id) for id in ids).decode() == text


LARGE = 10**9


@pytest.mark.parametrize(
    "source",
    [
        "{% set deadline__ = 1e99 %}{% for i in range(9999) %}{% for j in range(9999) %}"
        "{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.center(width) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ 'x'|center(width) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ 'a\\tb'.expandtabs(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (width, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, width) }}",
        "{{ [1]|tojson(indent=width) }}",
        "{{ ('a' * 9999)|replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
        "{{ ('b' * 99999).join(['a'] * 9999) }}",
        "{{ (['a'] * 9999)|join('b' * 99999) }}",
        "{{ ('\\n' * 9999)|indent(99999) }}",
        "{% set ns = namespace(x='x' * 1000) %}{% for i in range(40) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set big = 'x' * 9999999 %}{% set y %}{% for i in range(9999) %}{{ big }}{% endfor %}"
        "{% endset %}",
        "{% macro m() %}{% for i in range(9999) %}{{ 'x' * 9999999 }}{% endfor %}{% endmacro %}"
        "{% set y = m() %}",
        "{% set ns = namespace(all=[]) %}{% for i in range(9999) %}"
        "{% set ns.all = ns.all + [('x' * 9999999) ~ i] %}{% endfor %}",
        "{% set ns = namespace(all=[]) %}{% for i in range(9999) %}"
        "{% set ns.all = ns.all + [('\u1234' * 9999999) ~ i] %}{% endfor %}",
        "{% set ns = namespace(all=[]) %}{% for i in range(9999) %}"
        "{% set ns.all = ns.all + [[i] * 7999999] %}{% endfor %}",
        "{{ ([[[[1]]]] * 9999)|tojson(indent=900000) }}",
        "{{ ([1] * 9999)|tojson(separators=('x' * 9999999, ':')) }}",
    ],
)
def test_a_template_is_limited_in_time_and_memory(source: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), limits[1]))
    try:
        template = ChatTemplate(source, seconds=2.0)
        with pytest.raises(RequestError, match="the chat template") as caught:
            template.render([], width=LARGE)
        assert "failed: " not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_common_template_operations_work() -> None:
    source = (
        "{{ 'a' ~ 1 ~ none }}{{ '%s-%05d' % ('b', 7) }}{{ '%s'|format('c') }}{{ 'd'.ljust(3) }}|"
        "{{ '{:>4}'.format('e') }}{{ ['f', 'g']|join(', ') }}{{ 'h'|replace('h', 'i') }}"
        "{{ ('j\\nk')|indent(2) }}{{ {'l': 1}|tojson(indent=2) }}{{ messages|length }}"
    )
    expected = 'a1Noneb-00007cd  |   ef, gij\n  k{\n  "l": 1\n}0'
    assert ChatTemplate(source).render([]) == expected
