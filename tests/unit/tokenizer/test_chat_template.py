"""Chat templates render as with transformers; what they refuse is the client's error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.common.errors import ConfigError, InvalidRequest
from services.tokenizer.chat_template import Chat, ChatTemplate, ChatTemplates
from services.tokenizer.messages import parse_messages

SIMPLE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
TRIMS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}</s>{% endfor %}"

# In the manner of Llama 3.1: tools, dates, trimming, tojson with indent, tool calls.
LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system\\nToday: " + date_string + "\\n" + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '\\n' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|end|>" }}
    {%- else %}
        {{- "<|start|>ipython\\n" + message.content | tojson + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""

# In the manner of Qwen 3: namespaces, loop controls, reasoning, the generation tag, string methods.
QWEN = """\
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set head = message.content.split('</think>')[0] %}
            {%- set reasoning = head.rstrip('\\n').split('<think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- '<think>' + reasoning + '</think>' }}
        {{- message.content.split('</think>')[-1] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>' }}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{{- dict(a=1) | tojson }}
"""

PARTS = """\
{%- for message in messages %}
{{- '<' + message['role'] + '>' }}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'text' %}{{ part['text'] }}{% endif %}
    {%- endfor %}
{%- endfor %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Météo & <b>more</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": 3}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hi"}],
    "system": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "日本 <&>"},
    ],
    "empty system": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>two"},
        {"role": "user", "content": "3\n\n"},
    ],
    "reasoning": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "so"},
    ],
    "tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ],
}


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(model_dir / "tokenizer.json"), bos_token="<|im_start|>"
    )


def ours(source: str, chat: Chat) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<|im_start|>"}).render(chat)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(
    "source", [LLAMA, QWEN, SIMPLE, TRIMS], ids=["llama", "qwen", "simple", "trims"]
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(
    reference: PreTrainedTokenizerFast,
    name: str,
    source: str,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
) -> None:
    want = reference.apply_chat_template(
        CHATS[name],
        tools=tools,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        enable_thinking=False,
    )
    messages = parse_messages(json.dumps(CHATS[name]), keep_parts=False)
    chat = Chat(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        template_kwargs={"enable_thinking": False},
    )
    assert ours(source, chat) == want


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_packaged_model_renders_and_encodes_as_with_transformers(
    smollm2_dir: Path, name: str, add_generation_prompt: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_dir))
    templates = ChatTemplates.load(smollm2_dir)
    messages = parse_messages(json.dumps(CHATS[name]), keep_parts=False)
    chat = Chat(messages, add_generation_prompt=add_generation_prompt)
    text = templates.choose(with_tools=False).render(chat)
    assert text == tokenizer.apply_chat_template(
        CHATS[name], add_generation_prompt=add_generation_prompt, tokenize=False
    )


@pytest.mark.parametrize("content", ["The answer is ", "x", "  both  ", "\nline\n"])
@pytest.mark.parametrize("source", [SIMPLE, TRIMS], ids=["keeps spaces", "trims"])
def test_a_continued_message_stays_open_as_with_transformers(
    reference: PreTrainedTokenizerFast, content: str, source: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    want = reference.apply_chat_template(
        messages, chat_template=source, continue_final_message=True, tokenize=False
    )
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours(source, chat) == want
    assert messages[-1]["content"] == content  # the caller's message is untouched


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"role": "user", "content": ""}]])
def test_continuing_a_message_without_text_is_refused(messages: list[dict[str, Any]]) -> None:
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest) as raised:
        ours(SIMPLE, chat)
    assert raised.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user turns') }}",
        "{{ messages[9].content }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_whatever_a_template_raises_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        ours(source, Chat(CHATS["user"]))
    assert raised.value.param == "messages"


def test_a_broken_template_of_the_model_stops_the_service_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="template is broken"):
        ChatTemplates.load(tmp_path)


def test_a_model_without_a_template_refuses_chats_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplates.load(tmp_path).choose(with_tools=False)


def test_templates_come_from_the_jinja_file_else_from_the_tokenizer_config(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T{{ bos_token }}"},
    ]
    settings = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    templates = ChatTemplates.load(tmp_path)
    chat = Chat(CHATS["user"])
    assert templates.choose(with_tools=False).render(chat) == "D"
    assert templates.choose(with_tools=True).render(chat) == "T<s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplates.load(tmp_path).choose(with_tools=True).render(chat) == "file"


@pytest.mark.parametrize(
    ("source", "takes_parts"), [(PARTS, True), (SIMPLE, False), (LLAMA, False), (QWEN, False)]
)
def test_only_a_template_that_loops_over_content_gets_parts(source: str, takes_parts: bool) -> None:
    assert ChatTemplate(source, special_tokens={}).takes_content_parts is takes_parts
