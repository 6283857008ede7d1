"""openai-python's vectors, through the five processes, are those of transformers in float32."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.e2e.system import TINY_FLAGS, System
from tests.e2e.test_cancel import until_idle

TOLERANCE = 1e-4
TEXTS = ["What is the capital of France?", "x", "The quick brown fox jumps. " * 40]
IDS = [[*range(10, 300)], [7]]
LONG = [10 + i % 200 for i in range(4_000)]
# Steps far shorter than the longer inputs, and many of them.
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "32")


@pytest.fixture(scope="module")
def pooling_system(
    tiny_chat_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    log_file = tmp_path_factory.mktemp("serve") / "pooling.txt"
    with System(tiny_chat_dir, *TINY_FLAGS, *FLAGS, log_file=log_file) as system:
        yield system.until_ready()


@pytest.fixture(scope="module")
def client(pooling_system: System) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=120) as http,
        openai.OpenAI(
            base_url=f"{pooling_system.url}/v1", api_key="none", max_retries=0, http_client=http
        ) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def means(tiny_chat_dir: Path) -> list[torch.Tensor]:
    """Mean last states of ``TEXTS``, then of ``IDS``, not scaled."""
    tokenizer = Tokenizer.from_file(str(tiny_chat_dir / "tokenizer.json"))
    model = transformers.AutoModel.from_pretrained(tiny_chat_dir, dtype=torch.float32).eval()
    inputs = [*(tokenizer.encode(text).ids for text in TEXTS), *IDS]
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in inputs]


def require_equal(found: Sequence[Sequence[float]], means: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(means)
    for vector, mean in zip(found, means, strict=True):
        expected = torch.nn.functional.normalize(mean, dim=0).tolist()
        assert vector == pytest.approx(expected, abs=TOLERANCE)


def numbers(embedding: object) -> list[float]:
    """A vector that the client has left as it came: it decodes base64 only if it asked for it."""
    if isinstance(embedding, str):
        raw = base64.b64decode(embedding)
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    assert isinstance(embedding, list)
    return embedding


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
@pytest.mark.parametrize("dimensions", [None, 64, 10])
def test_vectors_are_those_of_transformers(
    client: openai.OpenAI,
    means: list[torch.Tensor],
    encoding_format: str | None,
    dimensions: int | None,
) -> None:
    given = {"encoding_format": encoding_format, "dimensions": dimensions}
    fields: Any = {name: value for name, value in given.items() if value is not None}
    texts = client.embeddings.create(model="tiny", input=TEXTS, **fields)
    ids = client.embeddings.create(model="tiny", input=IDS, **fields)
    one = client.embeddings.create(model="tiny", input=IDS[0], **fields)
    found = [numbers(entry.embedding) for reply in (texts, ids, one) for entry in reply.data]
    require_equal(found, [mean[:dimensions] for mean in (*means, means[len(TEXTS)])])
    assert ids.usage.prompt_tokens == ids.usage.total_tokens == len(IDS[0]) + len(IDS[1])


def test_vectors_are_right_while_others_generate_and_the_cache_is_hot(
    client: openai.OpenAI, means: list[torch.Tensor], pooling_system: System
) -> None:
    def generate(_: int) -> str:
        reply = client.completions.create(
            model="tiny",
            prompt=IDS[0],
            max_tokens=60,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        return reply.choices[0].text

    alone = generate(0)
    with ThreadPoolExecutor(6) as pool:
        texts = [pool.submit(generate, i) for i in range(3)]
        replies = [pool.submit(client.embeddings.create, model="tiny", input=IDS) for _ in range(3)]
        for text in texts:
            assert text.result() == alone
        for reply in replies:
            require_equal([entry.embedding for entry in reply.result().data], means[len(TEXTS) :])
    assert until_idle(pooling_system) < 5.0


def test_inputs_that_are_too_long_or_too_many_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input=[[7], [7] * 4097])
    assert (caught.value.param, caught.value.code) == ("input[1]", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="x", dimensions=65)
    assert caught.value.param == "dimensions"


def test_a_close_frees_the_blocks_within_a_second(pooling_system: System) -> None:
    until_idle(pooling_system, timeout_s=60)
    with pooling_system.sent("/v1/embeddings", input=[LONG, LONG]):
        pooling_system.until(
            lambda: pooling_system.load().kv_blocks_used > 0, timeout_s=60, what="blocks in use"
        )
    assert until_idle(pooling_system) < 1.0


def test_a_killed_worker_is_an_error_and_the_next_request_is_served(
    client: openai.OpenAI, means: list[torch.Tensor], pooling_system: System
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.embeddings.create, model="tiny", input=[LONG] * 4)
        pooling_system.until(
            lambda: pooling_system.load().running > 0, timeout_s=60, what="it runs"
        )
        pooling_system.kill("worker")
        with pytest.raises(openai.InternalServerError) as caught:
            asking.result(timeout=60)
    assert caught.value.status_code in (502, 503)
    pooling_system.until(lambda: pooling_system.health() == 200, timeout_s=180, what="it is back")
    reply = client.embeddings.create(model="tiny", input=IDS)
    require_equal([entry.embedding for entry in reply.data], means[len(TEXTS) :])
