"""guidellm, a benchmark that people point at servers, against a running system.

It asks for older click and multidict than this project has, so it lives in an environment of its
own, made by this run: its own packages first, then those that it shares with this project's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.system import System

pytestmark = pytest.mark.slow

REQUIREMENTS = Path(__file__).parent / "clients" / "guidellm.txt"
NUM_REQUESTS = 6
OUTPUT_TOKENS = 8


def run(*command: str | Path) -> None:
    """Run a command, or fail with what it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def guidellm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    environment = tmp_path_factory.mktemp("guidellm") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    pip = (sys.executable, "-m", "pip", "--python", environment, "install", "-q", "--no-compile")
    run(*pip, "--no-deps", "-r", REQUIREMENTS)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file comes after the packages beside it.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin" / "guidellm"


def test_guidellm_measures_the_system(
    guidellm: Path, system: System, tiny_chat_dir: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    run(
        *("env", "HF_HUB_OFFLINE=1"),
        *(guidellm, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={system.url},model=tiny"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tiny_chat_dir}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert requests["errored"] == []
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["time_to_first_token_ms"] > 0
