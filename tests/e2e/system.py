"""``sluiceway serve`` as a user starts it: its output, its children, its door."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import psutil

from services.common.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.common.rpc import TOKEN_KEY
from services.launcher.settings import SERVICES

CLUSTER_TOKEN = "token-of-the-tests"
START_TIMEOUT_S = 240.0
TINY_FLAGS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "2048")
READY_LINE = re.compile(r"^ready in [\d.]+ s - (http://\S+)$", re.MULTILINE)


class System:
    """One run of the launcher; use as ``with``, which ends it whatever happened.

    Attributes:
        url: Of the gateway, once ready.
        first_pids: Service → pid of its first life, once ready.
    """

    def __init__(self, model_dir: Path, *flags: str, log_file: Path) -> None:
        """
        Args:
            model_dir: What to serve.
            flags: Further flags of ``serve``.
            log_file: Where its output goes.
        """
        self.url = ""
        self.first_pids: dict[str, int] = {}
        self._log_file = log_file
        command = [sys.executable, "-m", "services.cli", "serve", str(model_dir)]
        command += ["--port", "0", "--cluster-token", CLUSTER_TOKEN, *flags]
        with log_file.open("wb") as log:
            self.launcher = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Self:
        # By default SIGTERM ends Python without leaving `with`, and all of this would stay behind.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        children = self._children()
        if self.launcher.poll() is None:
            self.launcher.kill()
        self.launcher.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    @property
    def output(self) -> str:
        """Everything that the launcher has printed."""
        return self._log_file.read_text(errors="replace")

    def until_ready(self) -> Self:
        """Wait for the ready line."""
        self.until(
            lambda: READY_LINE.search(self.output) is not None,
            timeout_s=START_TIMEOUT_S,
            what="the ready line",
        )
        found = READY_LINE.search(self.output)
        assert found is not None
        self.url = found[1]
        self.first_pids = self.pids()
        return self

    def until(self, fact: Callable[[], bool], *, timeout_s: float, what: str) -> float:
        """Wait for a fact of other processes.

        Returns:
            Seconds that it took.
        """
        began = time.monotonic()
        while not fact():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"{what}: not within {timeout_s} s; output:\n{self.output}")
            if self.launcher.poll() is not None and not fact():
                raise AssertionError(
                    f"{what}: the launcher has ended ({self.launcher.returncode}); "
                    f"output:\n{self.output}"
                )
            time.sleep(0.01)
        return time.monotonic() - began

    def pids(self) -> dict[str, int]:
        """Service → pid of its process."""
        return {name: process.pid for name, process in self._services().items()}

    def command_line(self, service: str) -> list[str]:
        """The command line that a child was given."""
        return self._services()[service].cmdline()

    def environment(self, service: str) -> Mapping[str, str]:
        """The environment that a child was given."""
        return self._services()[service].environ()

    def address(self, service: str) -> str:
        """The "host:port" on which a child listens."""
        words = self.command_line(service)
        port = next(word for word in words if word.startswith("--port="))
        return f"127.0.0.1:{port.removeprefix('--port=')}"

    def kill(self, service: str) -> None:
        """End a child as the kernel would when memory runs out."""
        os.kill(self.pids()[service], signal.SIGKILL)

    def interrupt(self) -> None:
        """What Ctrl-C sends."""
        self.launcher.send_signal(signal.SIGINT)

    def health(self) -> int:
        """Status of /health; 0 = refused."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def stats(self) -> scheduler_pb2.StatsReply:
        """What the scheduler says of its engines."""
        with grpc.insecure_channel(self.address("scheduler")) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            reply: scheduler_pb2.StatsReply = stub.Stats(
                scheduler_pb2.StatsRequest(),
                timeout=5.0,
                metadata=((TOKEN_KEY, CLUSTER_TOKEN),),
            )
        return reply

    def load(self) -> common_pb2.Load:
        """What the one engine does."""
        (engine,) = self.stats().engines
        return engine.load

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        """One chat completion, not streamed."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False
        )

    def no_space(self) -> dict[str, float]:
        """A ``logit_bias`` against white space: a random model fills JSON with all it may have."""
        replies = [
            httpx.post(f"{self.url}/tokenize", json={"prompt": text}, timeout=60, trust_env=False)
            for text in (" ", "\n", "\r", "\t")
        ]
        return {str(token): -100.0 for reply in replies for token in reply.json()["tokens"]}

    @contextlib.contextmanager
    def stream(self, text: str = "Hello", **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """One streamed chat completion: its events. It closes the connection when left."""
        body = {"messages": [{"role": "user", "content": text}], "stream": True, **fields}
        with self.events("/v1/chat/completions", **body) as events:
            yield events

    @contextlib.contextmanager
    def events(self, path: str, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of one streamed reply. It closes the connection when left."""
        with (
            httpx.Client(timeout=120.0, trust_env=False) as client,
            client.stream("POST", f"{self.url}{path}", json=body) as response,
        ):
            if response.is_error:
                response.read()
                raise AssertionError(f"{response.status_code}: {response.text}")
            yield _events(response.iter_lines())

    @contextlib.contextmanager
    def sent(self, path: str, **body: Any) -> Iterator[None]:
        """One request whose reply nobody reads. It closes the connection when left."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            yield

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.launcher.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _services(self) -> dict[str, psutil.Process]:
        found = {}
        for process in self._children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, ValueError):
                words = process.cmdline()
                module = words[words.index("-m") + 1]
                name = module.removeprefix("services.")
                if name in SERVICES:  # not one that the launcher has forked a moment ago
                    found.setdefault(name, process)
        return found


DONE: dict[str, Any] = {"done": True}


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Events of a stream; its end mark as ``DONE``."""
    for line in lines:
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            yield DONE if data == "[DONE]" else json.loads(data)
