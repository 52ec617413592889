"""Probing finds the format of tools and calls in templates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.text.chat_template import ChatTemplate, TemplateTraits
from quire.text.template_traits import probe

CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
)
AS_OBJECT = CALLS.replace("CALL", "{{ c.function.arguments | tojson }}")
AS_TEXT = CALLS.replace("CALL", "{{ 'call ' + c.function.arguments }}")
ONLY_WITHOUT_CONTENT = (
    "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (CALLS, TemplateTraits(shows_tools=False, shows_calls=False)),
        (AS_OBJECT, TemplateTraits(shows_tools=False, shows_calls=True)),
        (AS_TEXT, TemplateTraits(False, True, arguments_as_text=True)),
        (ONLY_WITHOUT_CONTENT, TemplateTraits(False, True, empty_content=None)),
        ("{{ tools | tojson }}" + AS_OBJECT, TemplateTraits(True, True)),
        (
            "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
            "{% endfor %}" + AS_OBJECT,
            TemplateTraits(True, True, needs_description=True),
        ),
        ("{{ raise_exception('no') }}", TemplateTraits(False, False)),
    ],
)
def test_probing(source: str, want: TemplateTraits) -> None:
    found = probe(ChatTemplate(source), {})
    assert replace(found, call=None) == want
    assert (found.call is not None) == want.shows_calls


def test_ids_that_name_tools() -> None:
    def found(call: str) -> TemplateTraits:
        calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
        return probe(
            ChatTemplate(f"{{% for m in messages %}}<{{{{ m.role }}}}>{calls}{{% endfor %}}"), {}
        )

    by_id = found("{{ c.id }} {{ c.function.arguments | tojson }}")
    assert by_id.ids_name_tools
    assert "functions.probed_tool:0 " in str(by_id.call)
    both = found("{{ c.function.name }} {{ c.id }} {{ c.function.arguments | tojson }}")
    assert not both.ids_name_tools
    assert "probe1234" in str(both.call)
    assert not found("{{ c.function.arguments | tojson }}").ids_name_tools


def test_a_call_begins_after_the_generation_prompt() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert probe(ChatTemplate(source), {}).call == '{"probed_key": "probed_value"}'
    # Marks with a common beginning are kept whole.
    other = source.replace("<{{ m.role }}>", "<as-{{ m.role }}>")
    assert str(probe(ChatTemplate(other), {}).call).startswith("<as-assistant>")
