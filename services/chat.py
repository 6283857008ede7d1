"""``sluiceway chat``: a conversation with a running server, in the terminal.

The reply streams as it is made; Ctrl-C stops a reply, and what came of it stays in the history.
``/clear`` forgets the conversation, ``/exit`` or Ctrl-D ends it. Where standard input is no
terminal, each line is a message and nothing but the replies is printed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from typing import Any, TextIO

import httpx
from pydantic import BaseModel, ConfigDict, Field

from services.common.errors import SluicewayError, Unavailable, error_from_name

EXIT_OK = 0
EXIT_FAILED = 1

_HELP = "Ctrl-C stops a reply, /clear forgets the conversation, /exit or Ctrl-D ends."
_PROMPT = "> "
# A reply may take long to begin (a queue, a long prefill); a connection may not.
_TIMEOUT = httpx.Timeout(None, connect=5.0)


class ChatConfig(BaseModel):
    """What the chat can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field("http://127.0.0.1:8000", description="Address of the server.")
    model: str | None = Field(None, description="Model to talk to; default: the first one served.")
    system: str | None = Field(None, description="System message that opens the conversation.")
    api_key: str | None = Field(None, description="Key, if the server wants one.", repr=False)
    temperature: float | None = Field(None, ge=0, description="Default: the server's.")
    max_tokens: int | None = Field(None, ge=1, description="Longest reply, in tokens.")


class Conversation:
    """A history and the server that continues it."""

    def __init__(self, config: ChatConfig, client: httpx.Client) -> None:
        """
        Args:
            config: Model (set), system message, sampling.
            client: Its base URL is the server's.
        """
        self._config = config
        self._client = client
        self._messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        system = self._config.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def reply(self, text: str) -> Generator[str]:
        """Say something and yield the reply piece by piece.

        Closing the generator stops the reply on the server as well; what has come stays known.

        Raises:
            SluicewayError: The server refused or failed; the message is its own.
        """
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self._messages.pop()

    def _stream(self) -> Iterator[str]:
        config = self._config
        body: dict[str, Any] = {"model": config.model, "messages": self._messages, "stream": True}
        chosen = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        body |= {name: value for name, value in chosen.items() if value is not None}
        with (
            _translated(self._client),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield from _deltas(response.iter_lines())


def _deltas(lines: Iterator[str]) -> Iterator[str]:
    """The text in a stream of server-sent events.

    Raises:
        SluicewayError: The stream carries an error, or ends without its end mark.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise SluicewayError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
    raise Unavailable("the server went away in the middle of the reply")


@contextlib.contextmanager
def _translated(client: httpx.Client) -> Iterator[None]:
    """Turn httpx's errors into ours."""
    try:
        yield
    except httpx.ConnectError as error:
        raise Unavailable(
            f"no server at {client.base_url}: start one with `sluiceway serve`, "
            "or name another with --url"
        ) from error
    except httpx.HTTPError as error:
        raise Unavailable(f"the connection broke: {error or type(error).__name__}") from error


def _refusal(response: httpx.Response) -> SluicewayError:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return error_from_name("SluicewayError", f"{message} (HTTP {response.status_code})")


def chat(config: ChatConfig, *, source: TextIO, out: TextIO, is_terminal: bool) -> int:
    """Talk until the source ends.

    Args:
        config: Which server, which model, how.
        source: Where the user's lines come from.
        out: Where replies go.
        is_terminal: Whether a person types: there is a prompt, and a failed reply ends nothing.

    Returns:
        0, or 1 if a reply failed and no person could say what to do.

    Raises:
        Unavailable: There is no server.
    """
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    url = config.url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False) as client:
        model = config.model or _first_model(client)
        talk = Conversation(config.model_copy(update={"model": model}), client)
        if is_terminal:
            out.write(f"{model} at {url}. {_HELP}\n")
        return _converse(talk, _lines(source, out, is_terminal=is_terminal), out, is_terminal)


def _first_model(client: httpx.Client) -> str:
    with _translated(client):
        response = client.get("/v1/models")
    if response.is_error:
        raise _refusal(response)
    return str(response.json()["data"][0]["id"])


def _lines(source: TextIO, out: TextIO, *, is_terminal: bool) -> Iterator[str]:
    """The user's lines; at a prompt, with line editing, where there is a terminal."""
    if not is_terminal:
        yield from (line.strip() for line in source)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    while True:
        try:
            yield input(_PROMPT).strip()
        except EOFError:
            out.write("\n")
            return
        except KeyboardInterrupt:
            out.write(f"\n{_HELP}\n")


def _converse(talk: Conversation, lines: Iterator[str], out: TextIO, is_terminal: bool) -> int:
    for line in lines:
        if line == "/exit":
            break
        if line == "/clear":
            talk.clear()
        elif line.startswith("/") and is_terminal:
            out.write(f"{_HELP}\n")
        elif line and not _say(talk, line, out) and not is_terminal:
            return EXIT_FAILED
    return EXIT_OK


def _say(talk: Conversation, line: str, out: TextIO) -> bool:
    """Print the reply to one line; whether it came to its end, or to the end that the user made."""
    try:
        with contextlib.closing(talk.reply(line)) as reply:
            for piece in reply:
                out.write(piece)
                out.flush()
    except KeyboardInterrupt:
        out.write(" [stopped]")
    except SluicewayError as error:
        out.write(f"\n[error] {error.message}\n")
        return False
    out.write("\n")
    return True
