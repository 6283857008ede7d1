"""What is refused by name, and the names of chat's fields in Anthropic's API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.common.errors import InvalidRequest

# Field → values that mean the same as not giving it.
REFUSED: dict[str, tuple[object, ...]] = {
    "betas": ([],),
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
INSTEAD = {"output_format": "use output_config.format"}
REFUSED_OF_TOOLS: dict[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
}
REFUSED_OF_OUTPUT: dict[str, tuple[object, ...]] = {"task_budget": ()}

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_NAME = re.compile(
    rf"(?<![\w.])({'|'.join(_NAMES)})\b(?!_)|(?<=\])\.function\.parameters\b|(?<=\])\.function\b"
)
_WORDS = {
    "tool_choice may be required, or name a function": "tool_choice may be any, or name a tool",
    "tool_choice to none or required": "tool_choice to none or any",
}


def own_name(text: str) -> str:
    """A text in which chat's fields have the names of this API."""
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return _NAME.sub(_own, text)


def _own(match: re.Match[str]) -> str:
    if match[0] == ".function.parameters":
        return ".input_schema"
    return _NAMES.get(match[0], "")


def own_names(spellings: Mapping[str, str]) -> dict[str, str]:
    """Spellings of chat's fields as those of this API's."""
    return {"stop": "stop_sequences"} | {name: own_name(field) for name, field in spellings.items()}


@contextmanager
def in_own_words() -> Iterator[None]:
    """Errors of a chat name fields as this API does."""
    try:
        yield
    except InvalidRequest as error:
        param = None if error.param is None else own_name(error.param)
        raise type(error)(own_name(error.message), param=param, code=error.code) from None
