"""Renders a chat with the model's Jinja template, to the same text as transformers renders it.

The environment (sandbox, trimming, ``tojson``, ``raise_exception``, ``strftime_now``, loop
controls, the ``generation`` tag) is the one that templates on the hub are written for. Templates
are code from strangers: they see plain JSON values only, and run in Jinja's immutable sandbox.
Knows nothing of tokens; ``messages.py`` brings OpenAI's messages into the shape that templates
expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import ConfigError, InvalidRequest
from services.common.fingerprint import TEMPLATE_FILE, read_json

JsonObject = dict[str, Any]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RENDER_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RuntimeError,
)  # fmt: skip
"""What a template may raise on a chat that it was not written for."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What is to be rendered.

    Attributes:
        messages: As ``messages.py`` returns them; at least one.
        tools: Tool definitions; ``None`` = none.
        template_kwargs: Further variables of the template.
        add_generation_prompt: Whether to open the assistant's answer.
        continue_final_message: Whether the last message is left open, to be continued.
    """

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """One compiled template. Rendering is safe from several threads."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: Jinja source.
            special_tokens: Variables such as ``bos_token``.

        Raises:
            jinja2.TemplateSyntaxError: ``source`` cannot be compiled.
        """
        self._source = source
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        self.takes_content_parts = _iterates_over_content(source)

    def render(self, chat: Chat) -> str:
        """The prompt of a chat.

        Raises:
            InvalidRequest: The template refuses the chat or fails on it.
        """
        messages = [dict(message) for message in chat.messages]
        ending = (
            _open_final_message(messages, self._source) if chat.continue_final_message else None
        )
        variables = {**self._special_tokens, **chat.template_kwargs}
        try:
            text = self._template.render(
                **{
                    **variables,
                    "messages": messages,
                    "tools": chat.tools,
                    "documents": variables.get("documents"),
                    "add_generation_prompt": chat.add_generation_prompt,
                }
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return text if ending is None else _cut_at_tag(text, ending)


class ChatTemplates:
    """The templates of one model: a default and, with some models, one for requests with tools."""

    def __init__(self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            sources: Jinja source by name ("default", "tool_use", ...); empty = no chat with this
                model.
            special_tokens: Variables such as ``bos_token``.

        Raises:
            ConfigError: A template cannot be compiled.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {
                name: ChatTemplate(source, special_tokens=special_tokens)
                for name, source in sources.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is broken: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplates:
        """Read the templates of a model directory.

        ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` go before the
        ``chat_template`` entry of ``tokenizer_config.json``, as in transformers.

        Raises:
            ConfigError: A file cannot be read, or a template is broken.
        """
        path = model_dir / "tokenizer_config.json"
        settings = read_json(path) if path.exists() else {}
        sources = _template_files(model_dir) or _template_entries(settings.get("chat_template"))
        return cls(sources, special_tokens=special_tokens(model_dir, settings))

    def choose(self, *, with_tools: bool) -> ChatTemplate:
        """The template for a request.

        Raises:
            InvalidRequest: The model has none.
        """
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        return self._templates["default"]

    def compile(self, source: str) -> ChatTemplate:
        """A template that came with a request.

        Raises:
            InvalidRequest: It cannot be compiled.
        """
        try:
            return ChatTemplate(source, special_tokens=self._special_tokens)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"chat_template cannot be compiled: {error}", param="chat_template"
            ) from error


def special_tokens(model_dir: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens (``bos_token``, ...) that a template may use.

    Args:
        model_dir: Where ``special_tokens_map.json`` may be; read only if ``settings`` is of the old
            form without ``added_tokens_decoder``.
        settings: Contents of ``tokenizer_config.json``.
    """
    merged = dict(settings)
    legacy = model_dir / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and legacy.exists():
        merged |= read_json(legacy)
    for nested in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(merged.get(nested), dict):
            merged |= merged[nested]
    named = {key: _token_text(value) for key, value in merged.items() if key.endswith("_token")}
    return {key: text for key, text in named.items() if text is not None}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_files(model_dir: Path) -> dict[str, str]:
    sources = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
    }
    main = model_dir / TEMPLATE_FILE
    if main.exists():
        sources["default"] = main.read_text(encoding="utf-8")
    return sources


def _template_entries(entry: Any) -> dict[str, str]:
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return {}


def _open_final_message(messages: list[JsonObject], source: str) -> str:
    """Mark the end of the last message's text; returns that text.

    The tag ends in a space: whether the space survives tells whether the template trims messages.
    """
    content = messages[-1].get("content")
    if "content" not in source or not content:
        raise InvalidRequest(
            "continue_final_message needs a last message with text", param="continue_final_message"
        )
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_TAG
        return content
    parts = [dict(part) for part in content]
    messages[-1]["content"] = parts
    for part in reversed(parts):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + _CONTINUE_TAG
            return text
    raise InvalidRequest(
        "continue_final_message needs a last message with text", param="continue_final_message"
    )


def _cut_at_tag(text: str, ending: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if tag not in text or ending.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the chat template drops or changes the last message",
            param="continue_final_message",
        )
    start = text.rindex(tag)
    keeps_spaces = text.startswith(_CONTINUE_TAG, start)
    return text[:start] if keeps_spaces else text[:start].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks training text; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Dict:
    """``dict(...)`` without the class itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace(...)`` without names that begin with "_", the way out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameter at all, so that a template may write namespace(self=...).
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes no HTML and takes the options of ``json.dumps``."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _iterates_over_content(source: str) -> bool:
    """Whether the template loops over a message's ``content``, so takes it as a list of parts."""
    tree = _environment().parse(source)
    return any(_reads_content(loop.iter) for loop in tree.find_all(nodes.For))


def _reads_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _reads_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == "content")
    return isinstance(node, nodes.Name) and node.name == "content"
