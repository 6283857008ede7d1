"""What a user of ``sluiceway serve`` gets."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx

from tests.e2e.system import CLUSTER_TOKEN, DONE, System


def test_the_ready_line_stands_alone_and_names_the_url(system: System) -> None:
    ready = [line for line in system.output.splitlines() if line.startswith("ready in")]
    assert len(ready) == 1
    assert re.fullmatch(r"ready in [\d.]+ s - http://127\.0\.0\.1:\d+", ready[0])


def test_a_table_shows_process_pid_address_and_kv_capacity(system: System) -> None:
    for service, pid in system.first_pids.items():
        row = next(
            line for line in system.output.splitlines() if re.match(rf"{service}\s+{pid}\s", line)
        )
        assert system.address(service) in row
        if service == "worker":
            info = system.stats().engines[0].info
            capacity = info.num_blocks * info.kv_groups[0].block_size
            assert f"{capacity:,} tokens" in row


def test_the_curl_that_is_printed_works(system: System) -> None:
    lines = system.output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("curl "))
    command = "\n".join(lines[first : first + 2])
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True
    )
    assert '"chat.completion"' in done.stdout


def test_the_openai_snippet_that_is_printed_works(system: System) -> None:
    lines = system.output.splitlines()
    first = lines.index("from openai import OpenAI")
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith("print("))
    program = "\n".join(lines[first : last + 1])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_progress_of_slow_phases_is_printed(system: System) -> None:
    before_ready = system.output.split("\nready in")[0]
    assert "waiting for" in before_ready
    assert re.search(r"worker: \w", before_ready)


def test_the_log_of_every_child_is_merged_behind_its_name(system: System) -> None:
    for service in system.pids():
        assert re.search(rf"^\d\d:\d\d:\d\d {service} +\w*listening", system.output, re.MULTILINE)


def test_the_cluster_token_is_in_no_command_line(system: System) -> None:
    names = {f"SLUICEWAY_{service.upper()}__CLUSTER_TOKEN" for service in system.pids()}
    given = {name for s in system.pids() for name in system.environment(s) if name in names}
    assert given == names
    assert not any(CLUSTER_TOKEN in word for s in system.pids() for word in system.command_line(s))


def test_greedy_requests_are_answered_streamed_and_not_with_the_same_text(system: System) -> None:
    fields = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    whole = system.chat("Tell me a story.", **fields).json()
    with system.stream("Tell me a story.", **fields) as events:
        seen = list(events)
    assert seen[-1] is DONE
    pieces = [c["delta"].get("content") or "" for e in seen[:-1] for c in e["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 16


def test_many_at_once_are_all_answered(system: System) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        replies = list(
            pool.map(lambda i: system.chat(f"Say {i}", ignore_eos=True, max_tokens=20), range(32))
        )
    assert [reply.status_code for reply in replies] == [200] * 32
    assert {reply.json()["usage"]["completion_tokens"] for reply in replies} == {20}


def test_the_metrics_of_the_engines_come_through_the_gateway(system: System) -> None:
    system.chat()
    text = httpx.get(f"{system.url}/metrics", trust_env=False).text
    assert "vllm:num_requests_running" in text
    assert "vllm:kv_cache_usage_perc" in text


def test_chat_streams_from_the_running_server(system: System) -> None:
    command = [sys.executable, "-m", "services.cli", "chat", "--url", system.url]
    command += ["--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run(
        command, input="Hello\nAgain\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") >= 2


def test_smollm2_knows_the_capital_of_france(smollm2_system: System) -> None:
    question = "What is the capital of France? Answer in one word."
    reply = smollm2_system.chat(question, temperature=0, max_tokens=20).json()
    assert reply["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == 42
    assert reply["model"] == "smollm2"
