"""LangChain's ChatOpenAI against a running system; prints what it got as JSON.

Usage: with_langchain.py URL MODEL LOGIT_BIAS
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL, BIAS = sys.argv[1:]


@tool
def set_light(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Switch the light of a room."""
    return f"{room}: {on}"


class Mood(BaseModel):
    """How somebody feels."""

    word: Literal["good", "bad"]
    is_sure: bool


def main() -> None:
    """Ask in every way."""
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        temperature=0,
        model_kwargs={"logit_bias": json.loads(BIAS)},
        max_completion_tokens=200,
        timeout=300,
        stream_usage=True,
    )
    short = model.bind(max_completion_tokens=12)
    whole = short.invoke("Hello")
    chunks = list(short.stream("Hello"))
    bound = model.bind_tools([set_light], tool_choice="any")
    asked: AIMessage = bound.invoke("Light in the hall, please.")
    (call,) = asked.tool_calls
    streamed = None
    for chunk in bound.stream("Light in the hall, please."):
        streamed = chunk if streamed is None else streamed + chunk
    answer = ToolMessage(set_light.invoke(call["args"]), tool_call_id=call["id"])
    conversation = [HumanMessage("Light in the hall, please."), asked, answer]
    found = {
        "whole": whole.content,
        "usage": whole.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in chunks),
        "streamed_usage": sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks),
        "batch": [reply.content for reply in short.batch(["Hello", "Hello"])],
        "call": [call["name"], call["args"]],
        "streamed_call": [streamed.tool_calls[0]["name"], streamed.tool_calls[0]["args"]],
        "after_the_call": short.invoke(conversation).response_metadata["finish_reason"],
        "structured": model.with_structured_output(Mood).invoke("How are you?").model_dump(),
        "by_a_tool": model.with_structured_output(Mood, method="function_calling")
        .invoke("How are you?")
        .model_dump(),
        "responses": by_responses(),
    }
    print(json.dumps(found))


def by_responses() -> dict[str, object]:
    """The same over POST /v1/responses."""
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        temperature=0,
        extra_body={"logit_bias": json.loads(BIAS)},
        timeout=300,
        use_responses_api=True,
    )
    short = model.bind(max_output_tokens=12)
    bound = model.bind_tools([set_light], tool_choice="any")
    asked: AIMessage = bound.invoke("Light in the hall, please.")
    (call,) = asked.tool_calls
    answer = ToolMessage(set_light.invoke(call["args"]), tool_call_id=call["id"])
    conversation = [HumanMessage("Light in the hall, please."), asked, answer]
    return {
        "whole": short.invoke("Hello").text,
        "streamed": "".join(chunk.text for chunk in short.stream("Hello")),
        "call": [call["name"], call["args"]],
        "after_the_call": short.invoke(conversation).response_metadata["status"],
        "structured": model.with_structured_output(Mood).invoke("How are you?").model_dump(),
    }


main()
