"""The texts that the user of ``sluiceway serve`` sees."""

from __future__ import annotations

from services.launcher.probes import Traffic, WorkerState
from services.launcher.report import (
    Row,
    draining,
    milestone,
    progress,
    snippets,
    table,
    traffic,
    worker_progress,
)

LOADING = WorkerState("load weights", 0.45, done_bytes=120_000_000, total_bytes=270_000_000)
READY = WorkerState(kv_tokens=32_768, max_model_len=8_192, device="cpu", dtype="float32")


def test_loading_shows_phase_percent_and_bytes() -> None:
    assert worker_progress("worker", LOADING) == "worker: load weights 45 % (120 MB of 270 MB)"
    assert worker_progress("worker", WorkerState("warm up", 1.0)) == "worker: warm up 100 %"


def test_progress_names_every_child_that_is_not_ready() -> None:
    text = progress({"worker": LOADING}, ["gateway", "worker"], seconds=12.3)
    assert text.startswith("worker: load weights 45 %")
    assert text.endswith("waiting for gateway (12 s)")


def test_plain_progress_has_a_line_per_phase_quarter_and_child_that_becomes_ready() -> None:
    def at(fraction: float, *pending: str) -> str:
        return milestone({"worker": WorkerState("load weights", fraction)}, pending)

    assert at(0.01, "worker") == at(0.2, "worker")
    assert at(0.2, "worker") != at(0.3, "worker")
    assert at(0.2, "worker") != at(0.2, "worker", "gateway")


def test_the_table_has_a_row_per_process_with_the_kv_capacity_in_tokens() -> None:
    lines = table(
        [
            Row("gateway", 7, "http://127.0.0.1:8000"),
            Row("worker", 12_345, "127.0.0.1:50053", READY),
        ]
    )
    assert lines == [
        "process  pid    address                KV cache",
        "gateway  7      http://127.0.0.1:8000",
        "worker   12345  127.0.0.1:50053        32,768 tokens (4.0 x 8,192)  float32 on cpu",
    ]


def test_the_snippets_mention_a_key_only_if_one_is_needed() -> None:
    url = "http://127.0.0.1:8000"
    assert "Bearer" not in "\n".join(snippets(url, model="m", needs_key=False))
    with_key = "\n".join(snippets(url, model="m", needs_key=True))
    assert "Authorization: Bearer YOUR_KEY" in with_key
    assert 'api_key="YOUR_KEY"' in with_key


def test_the_traffic_line_gives_rates_since_the_last_one() -> None:
    before = Traffic(prompt_tokens=1_000, generated_tokens=500, cache_queries=10, cache_hits=0)
    now = Traffic(
        requests=3,
        running=2,
        waiting=1,
        prompt_tokens=21_000,
        generated_tokens=1_500,
        cache_queries=110,
        cache_hits=25,
        blocks_used=50,
        blocks_total=200,
    )
    assert traffic(before, now, seconds=10.0) == (
        "2 running, 1 waiting · prompt 2,000 tok/s, output 100 tok/s · KV cache 25 % "
        "· prefix hits 25 %"
    )


def test_nothing_is_said_of_idle_seconds() -> None:
    idle = Traffic(prompt_tokens=100, generated_tokens=7, blocks_total=10)
    assert traffic(idle, idle, seconds=10.0) is None


def test_a_new_engine_whose_counters_start_over_gives_no_negative_rates() -> None:
    before = Traffic(prompt_tokens=100, generated_tokens=100, cache_queries=9, cache_hits=9)
    text = traffic(before, Traffic(requests=1), seconds=10.0)
    assert text is not None
    assert "-" not in text


def test_the_countdown_says_how_many_requests_and_seconds_are_left() -> None:
    assert draining(1, seconds_left=58.2).startswith("draining: 1 request left, 58 s")
    assert draining(2, seconds_left=3).startswith("draining: 2 requests left, 3 s")
    assert draining(None, seconds_left=3).startswith("draining: 3 s left")
