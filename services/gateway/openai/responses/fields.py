"""Fields of POST /v1/responses that are refused by name, and the names of chat's fields here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.common.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)

# Field → values that mean the same as not giving it.
REFUSED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "access_programs": (),
    "background_options": ({}, {"completion_window": "soonest"}),
    "context_management": ([],),
    "conversation": (),
    "image": ({}, {"context_compression": "auto"}),
    "prompt": (),
    # of chat and completions
    "n": (1,),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "best_of": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    # vLLM
    "enable_response_messages": (False,),
    "previous_input_messages": (),
}
INSTEAD = {
    "messages": "use input",
    "conversation": "use previous_response_id",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "logprobs": f"use include: [{LOGPROBS}]",
}
REFUSED_OF_REASONING: dict[str, tuple[object, ...]] = {
    # A thought comes whole, never summed up, and is given to the template again.
    "summary": ("auto",),
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "context": ("auto",),
}
REFUSED_OF_TOOLS: dict[str, tuple[object, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
}

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b|(?<=\])\.function\b")


def own_name(text: str) -> str:
    """A text in which chat's fields have the names of this API."""
    return _NAME.sub(lambda match: _NAMES.get(match[0], ""), text)


def own_names(spellings: Mapping[str, str]) -> dict[str, str]:
    """Spellings of chat's fields as those of this API's."""
    return {"messages": "input"} | {name: own_name(field) for name, field in spellings.items()}


@contextmanager
def in_own_words() -> Iterator[None]:
    """Errors of a chat name fields as this API does."""
    try:
        yield
    except InvalidRequest as error:
        param = None if error.param is None else own_name(error.param)
        raise type(error)(own_name(error.message), param=param, code=error.code) from None
