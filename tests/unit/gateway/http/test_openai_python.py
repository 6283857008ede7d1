"""openai-python against a real gateway: sync, async, streamed, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from services.common.errors import Overloaded, RequestFailed, Unavailable
from tests.fakes.tokenizer import MODEL, FakeTokenizer, Script
from tests.unit.gateway.http.conftest import Front, gateway

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@contextmanager
def sync_client(front: Front) -> Iterator[openai.OpenAI]:
    """A client without retries."""
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(
        base_url=front.url + "/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def async_client(front: Front, key: str = "none") -> openai.AsyncOpenAI:
    """A client without retries."""
    http = httpx.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=front.url + "/v1", api_key=key, max_retries=0, http_client=http
    )


async def test_sync_chat_and_completions(front: Front) -> None:
    def talk() -> tuple[str | None, str, list[str]]:
        with sync_client(front) as client:
            chat = client.chat.completions.create(model=MODEL, messages=HI)
            text = client.completions.create(model=MODEL, prompt="one")
            return (
                chat.choices[0].message.content,
                text.choices[0].text,
                [model.id for model in client.models.list()],
            )

    assert await asyncio.to_thread(talk) == ("Hello, world!", "Hello, world!", [MODEL])


async def test_sync_streams(front: Front) -> None:
    def talk() -> tuple[str, str]:
        with sync_client(front) as client:
            chat = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
            text = client.completions.create(model=MODEL, prompt="one", stream=True)
            return said, "".join(chunk.choices[0].text for chunk in text)

    assert await asyncio.to_thread(talk) == ("Hello, world!", "Hello, world!")


async def test_async_chat_with_everything_that_the_types_know(front: Front) -> None:
    async with async_client(front) as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=HI, n=2, logprobs=True, top_logprobs=2, seed=1, stop=["x"]
        )
    assert [choice.message.content for choice in reply.choices] == [
        "Hello, world!",
        "1:Hello, world!",
    ]
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert reply.choices[0].logprobs.content[0].token == "Hello"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


async def test_the_accumulator_puts_a_stream_together(front: Front) -> None:
    state = ChatCompletionStreamState()
    async with async_client(front) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, n=2, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            state.handle_chunk(chunk)
    whole = state.get_final_completion()
    assert [choice.message.role for choice in whole.choices] == ["assistant", "assistant"]
    assert whole.choices[1].message.content == "1:Hello, world!"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9


async def test_the_stream_helper_gives_the_final_message(front: Front) -> None:
    async with (
        async_client(front) as client,
        client.chat.completions.stream(model=MODEL, messages=HI) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world!"


class Weather(BaseModel):
    """A tool."""

    city: str
    days: int


WEATHER = openai.pydantic_function_tool(Weather)
CALL = '[{"name": "Weather", "arguments": {"city": "Rom", "days": 3}}]'


async def test_the_stream_helper_parses_the_arguments_of_a_required_call(front: Front) -> None:
    front.tokenizer.script = Script(tokens=[CALL[i : i + 5] for i in range(0, len(CALL), 5)])
    async with (
        async_client(front) as client,
        client.chat.completions.stream(
            model=MODEL, messages=HI, tools=[WEATHER], tool_choice="required"
        ) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls or []
    assert call.id.startswith("call_")
    assert call.function.parsed_arguments == Weather(city="Rom", days=3)


async def test_the_accumulator_puts_a_streamed_call_together_as_the_whole_reply_has_it(
    front: Front,
) -> None:
    front.tokenizer.script = Script(tokens=list(CALL))
    state = ChatCompletionStreamState()
    async with async_client(front) as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=HI, tools=[WEATHER], tool_choice="required"
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, tools=[WEATHER], tool_choice="required", stream=True
        )
        async for chunk in stream:
            state.handle_chunk(chunk)
    (wanted,) = whole.choices[0].message.tool_calls or []
    (found,) = state.get_final_completion().choices[0].message.tool_calls or []
    assert wanted.type == found.type == "function"
    assert found.function.arguments == wanted.function.arguments
    assert found.function.name == wanted.function.name


async def test_flags_set_how_thoughts_and_calls_are_read() -> None:
    text = '<think>Hm.</think><tool_call>{"name": "Weather", "arguments": {"city": "Rom"}}'
    script = Script(tokens=[text[i : i + 4] for i in range(0, len(text), 4)])
    async with (
        FakeTokenizer(script).serving() as tokenizer,
        gateway(tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3") as front,
        async_client(front) as client,
    ):
        reply = await client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])
    message = reply.choices[0].message
    assert message.model_extra is not None
    assert message.model_extra["reasoning"] == "Hm."
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == '{"city": "Rom"}'


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Overloaded("full"), openai.RateLimitError),
        (Unavailable("loading"), openai.InternalServerError),
        (RequestFailed("NaN"), openai.InternalServerError),
    ],
)
async def test_errors_are_raised_as_their_classes(
    front: Front, error: Exception, raised: type[openai.APIStatusError]
) -> None:
    front.tokenizer.script = Script(refusal=error)  # type: ignore[arg-type]
    async with async_client(front) as client:
        with pytest.raises(raised) as caught:
            await client.chat.completions.create(model=MODEL, messages=HI)
    assert caught.value.code


async def test_bad_requests_and_unknown_models_are_raised_with_param_and_code(front: Front) -> None:
    async with async_client(front) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=HI, temperature=-5)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=HI)
        assert missing.value.code == "model_not_found"


async def test_an_error_in_mid_stream_is_raised_and_never_a_clean_end(front: Front) -> None:
    front.tokenizer.script = Script(breaks_after=2)
    async with async_client(front) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_a_wrong_key_is_an_authentication_error() -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, api_key=("right",)) as front,
    ):
        async with async_client(front, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with async_client(front, "right") as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
