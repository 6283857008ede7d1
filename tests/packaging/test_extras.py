"""Each extra on its own: its service starts to run in it, and torch comes with the worker alone.

The wheel is built once and installed as ``<wheel>[extra]`` into a fresh environment per extra, with
the versions of constraints.txt. ``[cuda]`` is not tried: its packages need a CUDA toolkit.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {
    "gateway": ["services.gateway.__main__"],
    "tokenizer": ["services.tokenizer.__main__"],
    "scheduler": ["services.scheduler.__main__"],
    "worker": ["services.worker.__main__"],
    "kvstore": ["services.kvstore.__main__", "services.kvstore.redis_store"],
    "cli": ["services.cli", "services.chat", "services.launcher.serve"],
}
_IMPORT = """
import importlib, importlib.util, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({
    "where": importlib.util.find_spec("services").origin,
    "heavy": [name for name in ("torch", "transformers") if importlib.util.find_spec(name)],
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command; its standard output, or a failure that shows its errors."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, cwd=ROOT)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """An empty virtual environment; removed at once, since torch fills a gigabyte."""
    path = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", path, cwd=tmp_path)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_service_needs_its_own_extra_only_and_torch_is_the_workers(
    extra: str, wheel: Path, environment: Path
) -> None:
    pip = (sys.executable, "-m", "pip", "--python", environment, "install", "-q", "--no-compile")
    constraints = ("-c", ROOT / "constraints.txt")
    run(*pip, *constraints, f"{wheel}[{extra}]", cwd=environment)
    python = environment / "bin" / "python"
    found = json.loads(run(python, "-I", "-c", _IMPORT, *EXTRAS[extra], cwd=environment))
    assert Path(found["where"]).is_relative_to(environment)
    assert found["heavy"] == (["torch"] if extra == "worker" else [])
