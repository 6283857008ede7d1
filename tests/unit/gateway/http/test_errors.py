"""Every error wears OpenAI's envelope, and errors of the tokenizer keep their class and field."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    InvariantError,
    Overloaded,
    RequestFailed,
    SluicewayError,
    Unavailable,
    WorkerLost,
)
from services.gateway.fleet import Fleet
from tests.fakes.tokenizer import Script
from tests.unit.gateway.http.conftest import Front, events


def error_of(response: httpx.Response) -> dict[str, object]:
    """The envelope, its shape checked."""
    assert response.headers["content-type"] == "application/json", response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str | int)
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/no-such-route", 404),
        ("POST", "/", 404),
        ("GET", "/v1//models", 404),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/moderations", 404),
    ],
)
async def test_routes_that_do_not_exist_answer_in_the_envelope(
    front: Front, method: str, path: str, status: int
) -> None:
    response = await front.http.request(method, path)
    assert response.status_code == status
    error_of(response)


async def test_bytes_that_are_no_http_are_answered_in_the_envelope(front: Front) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"this is no HTTP\r\n\r\n")
    raw = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert raw.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_request_error"' in raw


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_unknown_model_is_a_404_and_no_stream_begins(front: Front, stream: bool) -> None:
    response = await front.chat(model="nope", stream=stream)
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


REFUSALS = [
    (InvalidRequest("bad stop", param="stop"), 400, "invalid_request_error", "stop", None),
    (
        ContextLengthExceeded("too long", param="max_tokens"),
        400,
        "invalid_request_error",
        "max_tokens",
        "context_length_exceeded",
    ),
    (Overloaded("full", retry_after_s=7), 429, "rate_limit_error", None, "overloaded"),
    (Unavailable("draining"), 503, "service_unavailable_error", None, "unavailable"),
    (DeadlineExceeded("late"), 504, "timeout_error", None, "deadline_exceeded"),
    (RequestFailed("NaN"), 500, "internal_error", None, "request_failed"),
    (WorkerLost("gone"), 502, "upstream_error", None, "worker_lost"),
    (InvariantError("bug"), 500, "internal_error", None, None),
]


@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), REFUSALS)
@pytest.mark.parametrize("how", ["refusal", "refused_finish"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_refusal_before_admission_is_a_plain_http_error(
    front: Front,
    error: SluicewayError,
    status: int,
    kind: str,
    param: str | None,
    code: str | None,
    how: str,
    stream: bool,
) -> None:
    front.tokenizer.script = Script(**{how: error})
    response = await front.chat(stream=stream)
    assert response.status_code == status
    body = error_of(response)
    assert (body["type"], body["param"], body["code"]) == (kind, param, code)
    assert error.message in str(body["message"])
    if status in (429, 502, 503):
        assert response.headers["retry-after"] == ("7" if status == 429 else "1")


@pytest.mark.parametrize("how", ["refusal", "refused_finish", "failure"])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]], ids=["one prompt", "a batch"])
async def test_a_constraint_that_is_refused_down_the_line_is_named_as_the_client_named_it(
    front: Front, how: str, prompt: object
) -> None:
    front.tokenizer.script = Script(
        **{how: InvalidRequest("this regex is bad", param="constraint")}
    )
    response = await front.complete(prompt, structured_outputs={"regex": "["})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "structured_outputs"
    assert error["message"] == "structured_outputs: this regex is bad"


async def test_a_constraint_that_the_worker_refuses_is_an_http_error_of_a_stream_too(
    front: Front,
) -> None:
    refusal = InvalidRequest("this regex is too large", param="constraint")
    front.tokenizer.script = Script(tokens=(), failure=refusal)
    response = await front.chat(stream=True, structured_outputs={"regex": "a{1000000}"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "structured_outputs"


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_a_failed_choice_fails_the_whole_reply(front: Front, kind: str) -> None:
    front.tokenizer.script = Script(failure=RequestFailed("NaN logits"))
    response = await (front.chat() if kind == "chat" else front.complete())
    assert response.status_code == 500
    assert error_of(response)["code"] == "request_failed"


BREAKS = {
    "the stream ends without a finish": (Script(breaks_after=2), "upstream_error"),
    "the tokenizer is lost": (
        Script(breaks_after=2, break_error=Unavailable("bye")),
        "upstream_error",
    ),
    "a worker is lost": (
        Script(breaks_after=2, break_error=WorkerLost("engine 7 died")),
        "upstream_error",
    ),
    "the choice fails": (Script(failure=RequestFailed("NaN")), "internal_error"),
    "tokens are missing": (Script(skips_token=True), "internal_error"),
}


@pytest.mark.parametrize(("script", "kind"), BREAKS.values(), ids=list(BREAKS))
async def test_an_error_in_mid_stream_is_one_last_line_and_no_done(
    front: Front, script: Script, kind: str
) -> None:
    front.tokenizer.script = script
    response = await front.chat(stream=True)
    assert response.status_code == 200
    *chunks, last = events(response)
    assert last["error"]["type"] == kind
    assert chunks and all("error" not in chunk for chunk in chunks)
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert "[DONE]" not in response.text


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(breaks_after=2), 502),
        (Script(breaks_after=2, break_error=Unavailable("bye")), 502),
        (Script(breaks_after=2, break_error=WorkerLost("died")), 502),
        (Script(skips_token=True), 500),
    ],
)
async def test_an_error_in_the_middle_of_a_whole_reply_is_an_http_error(
    front: Front, script: Script, status: int
) -> None:
    front.tokenizer.script = script
    response = await front.chat()
    assert response.status_code == status
    error_of(response)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
async def test_a_bug_is_a_500_in_the_envelope_that_tells_nothing_but_where_to_look(
    front: Front, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(Fleet, "models", broken)
    monkeypatch.setattr(Fleet, "resolve_model", broken)
    response = await (front.http.get(path) if path == "/v1/models" else front.chat())
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "internal_error"
    assert "debug id" in str(error["message"]) and "secret" not in response.text
    assert response.headers["x-request-id"].startswith("req-")


async def test_an_error_is_not_the_end_of_the_service(front: Front) -> None:
    front.tokenizer.script = Script(refusal=InvariantError("bug"))
    assert (await front.chat()).status_code == 500
    front.tokenizer.script = Script()
    assert (await front.chat()).status_code == 200


async def test_if_one_prompt_of_a_batch_is_refused_nothing_is_left_running(front: Front) -> None:
    response = await front.complete([[5], [999_999]])
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt[1][0]"
    assert front.tokenizer.num_running == 0
