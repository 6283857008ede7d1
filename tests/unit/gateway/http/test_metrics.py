"""/metrics: the engines' figures and the requests' latencies under vLLM's names."""

from __future__ import annotations

import re

from services.common.pb import tokenizer_pb2
from tests.fakes.tokenizer import MODEL, Script
from tests.unit.gateway.http.conftest import Front

ENGINE = f'{{engine="worker-a",model_name="{MODEL}"}}'


async def page(front: Front) -> dict[str, float]:
    """Sample (name and labels, labels sorted) → value."""
    response = await front.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for line in response.text.splitlines():
        if line.startswith("#"):
            continue
        name, labels, value = re.fullmatch(r"([^ {]+)(\{.*\})? (\S+)", line).groups()  # type: ignore[union-attr]
        pairs = ",".join(sorted(re.findall(r'\w+="[^"]*"', labels or "")))
        found[f"{name}{{{pairs}}}" if pairs else name] = float(value)
    return found


async def test_the_engines_figures_have_vllm_s_names(front: Front) -> None:
    samples = await page(front)
    expected = {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_preemptions_total": 4,
        "vllm:generation_tokens_total": 50,
        "vllm:prompt_tokens_total": 60,
        "vllm:prefix_cache_queries_total": 70,
        "vllm:prefix_cache_hits_total": 35,
    }
    for name, value in expected.items():
        assert samples[name + ENGINE] == value, name
    for reason, value in {"stop": 8, "length": 9, "abort": 10, "error": 11}.items():
        labels = f'{{engine="worker-a",finished_reason="{reason}",model_name="{MODEL}"}}'
        assert samples["vllm:request_success_total" + labels] == value
    cache = f'{{block_size="16",engine="worker-a",model_name="{MODEL}",num_gpu_blocks="100"}}'
    assert samples["vllm:cache_config_info" + cache] == 1
    assert samples["sluiceway_gateway_ready"] == 1
    assert samples["process_resident_memory_bytes"] > 0


async def test_a_request_counts_once_in_each_histogram(front: Front) -> None:
    await front.chat(max_tokens=3, n=2)
    samples = await page(front)
    once = (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_prefill_kv_computed_tokens",
        "request_params_max_tokens",
        "request_params_n",
    )
    for name in once:
        assert samples[f"vllm:{name}_count{ENGINE}"] == 1, name
    assert samples[f"vllm:request_generation_tokens_sum{ENGINE}"] == 6
    assert samples[f"vllm:request_params_n_sum{ENGINE}"] == 2
    assert samples[f"vllm:inter_token_latency_seconds_count{ENGINE}"] == 2 * (3 - 1)


async def test_phases_come_from_the_scheduler_s_clock(front: Front) -> None:
    await front.chat()
    samples = await page(front)
    for name, seconds in {"queue": 1, "prefill": 2, "decode": 3, "inference": 5}.items():
        assert samples[f"vllm:request_{name}_time_seconds_sum{ENGINE}"] == seconds, name
    assert samples[f"vllm:request_time_per_output_token_seconds_sum{ENGINE}"] == 1


async def test_first_token_time_is_measured_at_the_first_token(front: Front) -> None:
    front.tokenizer.script = Script(pace_s=0.2, tokens=("a", "b"))
    await front.chat(stream=True)
    samples = await page(front)
    first = samples[f"vllm:time_to_first_token_seconds_sum{ENGINE}"]
    whole = samples[f"vllm:e2e_request_latency_seconds_sum{ENGINE}"]
    assert first < whole - 0.2


async def test_buckets_are_cumulative_and_end_with_the_count(front: Front) -> None:
    await front.chat()
    await front.chat(max_tokens=1)
    samples = await page(front)
    rows = [
        value
        for name, value in samples.items()
        if name.startswith("vllm:request_generation_tokens_bucket")
    ]
    assert rows == sorted(rows)
    assert rows[0] == 1
    assert rows[-1] == samples[f"vllm:request_generation_tokens_count{ENGINE}"] == 2


async def test_figures_change_as_soon_as_the_tokenizer_says_so(front: Front) -> None:
    info = tokenizer_pb2.ServiceInfo()
    info.CopyFrom(front.tokenizer.info)
    info.engines[0].load.running = 0
    await front.tokenizer.set_info(info)
    for _ in range(100):
        if (await page(front))[f"vllm:num_requests_running{ENGINE}"] == 0:
            return
    raise AssertionError("the gauge did not follow")


async def test_requests_inside_are_counted(front: Front) -> None:
    assert (await page(front))["sluiceway_gateway_requests_in_flight"] == 0


async def test_it_tells_how_many_responses_are_kept(front: Front) -> None:
    first = (await front.respond()).json()["id"]
    await front.respond(store=False)
    await front.respond("more", previous_response_id=first)
    samples = await page(front)
    assert samples["sluiceway_gateway_stored_responses"] == 2
    before = samples["sluiceway_gateway_stored_response_bytes"]
    await front.http.delete(f"/v1/responses/{first}")
    samples = await page(front)
    assert samples["sluiceway_gateway_stored_responses"] == 1
    assert samples["sluiceway_gateway_stored_response_bytes"] == before > 1000  # still gone on from
