"""From what a request brings (text, token ids or a chat) to the token ids of its prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.tokenizer import metrics
from services.tokenizer.chat_template import Chat, ChatTemplate, ChatTemplates
from services.tokenizer.encode import Encoder
from services.tokenizer.messages import parse_messages, parse_template_kwargs, parse_tools


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Token ids as they are."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, in JSON as OpenAI clients send it.

    Attributes:
        chat_template: Jinja source; "" = the model's own.
    """

    messages_json: str
    tools_json: str = ""
    template_kwargs_json: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str = ""


Prompt = TextPrompt | IdsPrompt | ChatPrompt


class PromptReader:
    """Makes token ids of prompts."""

    def __init__(
        self, encoder: Encoder, templates: ChatTemplates, *, trust_request_template: bool
    ) -> None:
        """
        Args:
            encoder: The model's tokenizer.
            templates: The model's chat templates.
            trust_request_template: Whether a request may bring its own template.
        """
        self._encoder = encoder
        self._templates = templates
        self._trust_request_template = trust_request_template

    async def token_ids(self, prompt: Prompt, *, max_tokens: int | None = None) -> Sequence[int]:
        """Token ids of a prompt.

        Args:
            prompt: The prompt.
            max_tokens: As ``Encoder.encode``.

        Raises:
            InvalidRequest: It cannot be read, is empty, or has ids that the model does not have.
            ContextLengthExceeded: It is far longer than ``max_tokens``.
        """
        started = time.perf_counter()
        ids, param = await self._token_ids(prompt, max_tokens)
        if not ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", param=param)
        metrics.ENCODE_SECONDS.observe(time.perf_counter() - started)
        return ids

    async def _token_ids(self, prompt: Prompt, max_tokens: int | None) -> tuple[Sequence[int], str]:
        match prompt:
            case IdsPrompt():
                self._encoder.require_known(prompt.ids, param="prompt")
                return prompt.ids, "prompt"
            case TextPrompt():
                ids = await self._encoder.encode(
                    prompt.text,
                    add_special_tokens=prompt.add_special_tokens,
                    param="prompt",
                    max_tokens=max_tokens,
                )
                return ids, "prompt"
            case ChatPrompt():
                _, ids = await self.render(prompt, max_tokens=max_tokens)
                return ids, "messages"

    async def render(
        self, prompt: ChatPrompt, *, max_tokens: int | None = None
    ) -> tuple[str, list[int]]:
        """Text and token ids of a chat; the template has brought its own special tokens.

        Args:
            prompt: The chat.
            max_tokens: As ``Encoder.encode``.

        Raises:
            InvalidRequest: It is not a chat, or the template refuses it.
            ContextLengthExceeded: It is far longer than ``max_tokens``.
        """
        text = await self._encoder.in_thread(lambda: self._render(prompt))
        ids = await self._encoder.encode(
            text, add_special_tokens=False, param="messages", max_tokens=max_tokens
        )
        return text, ids

    def _render(self, prompt: ChatPrompt) -> str:
        add_generation_prompt = prompt.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not prompt.continue_final_message
        if add_generation_prompt and prompt.continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        tools = parse_tools(prompt.tools_json)
        template_kwargs = parse_template_kwargs(prompt.template_kwargs_json)
        template = self._template(prompt, with_tools=tools is not None)
        messages = parse_messages(prompt.messages_json, keep_parts=template.takes_content_parts)
        return template.render(
            Chat(
                messages=messages,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
            )
        )

    def _template(self, prompt: ChatPrompt, *, with_tools: bool) -> ChatTemplate:
        if not prompt.chat_template:
            return self._templates.choose(with_tools=with_tools)
        if not self._trust_request_template:
            raise InvalidRequest(
                "chat_template is not accepted from requests by this server "
                "(see --trust-request-chat-template)",
                param="chat_template",
            )
        return self._templates.compile(prompt.chat_template)
