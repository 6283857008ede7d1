"""The terminal chat, against a small HTTP server that speaks the API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.chat import ChatConfig, Conversation, chat
from services.common.errors import SluicewayError, Unavailable


class FakeServer(ThreadingHTTPServer):
    """Answers "Hello " and "N" where N counts the messages it was sent; keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.fails_with: str | None = None
        self.breaks_off = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(size))
        self.server.requests.append(body)
        self.server.keys.append(self.headers.get("authorization"))
        if self.server.fails_with is not None:
            error = {"error": {"message": self.server.fails_with}}
            return self._send(503, json.dumps(error).encode())
        pieces = ["Hello ", str(len(body["messages"]))]
        events = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
        if not self.server.breaks_off:
            events.append("[DONE]")
        self._send(200, "".join(f"data: {event}\n\n" for event in events).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def talk(server: FakeServer, text: str, **settings: Any) -> tuple[int, str]:
    out = io.StringIO()
    config = ChatConfig(url=server.url, **settings)
    return chat(config, source=io.StringIO(text), out=out, is_terminal=False), out.getvalue()


def test_without_a_terminal_only_the_replies_are_printed(server: FakeServer) -> None:
    assert talk(server, "hi\n\nagain\n") == (0, "Hello 1\nHello 3\n")


def test_the_history_is_kept_and_sent(server: FakeServer) -> None:
    talk(server, "hi\nagain\n", system="Be brief.", max_tokens=5, temperature=0.0)
    last = server.requests[-1]
    assert [m["role"] for m in last["messages"]] == ["system", "user", "assistant", "user"]
    assert last["messages"][2]["content"] == "Hello 2"
    assert (last["model"], last["max_tokens"], last["temperature"]) == ("tiny", 5, 0.0)


def test_clear_forgets_the_history_and_exit_ends(server: FakeServer) -> None:
    assert talk(server, "hi\n/clear\nhi\n/exit\nnever\n") == (0, "Hello 1\nHello 1\n")


def test_the_key_is_sent(server: FakeServer) -> None:
    talk(server, "hi\n", api_key="secret")
    assert server.keys == ["Bearer secret"]


def test_a_refusal_shows_the_servers_message_and_fails(server: FakeServer) -> None:
    server.fails_with = "no worker is ready"
    code, text = talk(server, "hi\nagain\n")
    assert code == 1
    assert "no worker is ready" in text
    assert len(server.requests) == 1


def test_a_stream_that_ends_without_its_mark_is_a_failure(server: FakeServer) -> None:
    server.breaks_off = True
    code, text = talk(server, "hi\n")
    assert code == 1
    assert "went away in the middle" in text


def test_a_stopped_reply_stays_in_the_history(server: FakeServer) -> None:
    import httpx

    with httpx.Client(base_url=server.url) as client:
        conversation = Conversation(ChatConfig(model="tiny"), client)
        reply = conversation.reply("hi")
        assert next(reply) == "Hello "
        reply.close()
        assert list(conversation.reply("go on")) == ["Hello ", "3"]
    assert server.requests[-1]["messages"][1] == {"role": "assistant", "content": "Hello "}


def test_a_failed_reply_leaves_no_trace_in_the_history(server: FakeServer) -> None:
    import httpx

    with httpx.Client(base_url=server.url) as client:
        conversation = Conversation(ChatConfig(model="tiny"), client)
        server.fails_with = "busy"
        with pytest.raises(SluicewayError, match="busy"):
            list(conversation.reply("hi"))
        server.fails_with = None
        assert list(conversation.reply("hi")) == ["Hello ", "1"]


def test_no_server_is_an_error_that_names_the_fix() -> None:
    with pytest.raises(Unavailable, match="sluiceway serve"):
        chat(
            ChatConfig(url="http://127.0.0.1:9"),
            source=io.StringIO("hi\n"),
            out=io.StringIO(),
            is_terminal=False,
        )
