"""LiteLLM against a running system; prints what it got as JSON.

Usage: with_litellm.py URL MODEL LOGIT_BIAS; the environment: LITELLM_LOCAL_MODEL_COST_MAP=True
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

URL, MODEL, BIAS = sys.argv[1:]
COMMON: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "logit_bias": json.loads(BIAS),
    "max_tokens": 12,
    "timeout": 300,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
        },
    },
}


def joined(chunks: Any) -> str:
    """The text of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def streamed() -> str:
    """The same with the asynchronous client."""
    chunks = await litellm.acompletion(**COMMON, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def main() -> None:
    """Ask in every way."""
    whole = litellm.completion(**COMMON)
    called = litellm.completion(
        **COMMON | {"max_tokens": 200}, tools=[TOOL], tool_choice="required"
    )
    (call,) = called.choices[0].message.tool_calls
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="Hello",
        **{name: COMMON[name] for name in ("api_base", "api_key", "temperature", "max_tokens")},
    )
    try:
        litellm.completion(**COMMON | {"temperature": -1})
        error = ""
    except litellm.BadRequestError as caught:
        error = str(caught)
    found = {
        "whole": whole.choices[0].message.content,
        "completion_tokens": whole.usage.completion_tokens,
        "streamed": joined(litellm.completion(**COMMON, stream=True)),
        "streamed_async": asyncio.run(streamed()),
        "call": [call.function.name, json.loads(call.function.arguments)],
        "finish_reason": called.choices[0].finish_reason,
        "text": text.choices[0].text,
        "error": error,
    }
    print(json.dumps(found))


main()
