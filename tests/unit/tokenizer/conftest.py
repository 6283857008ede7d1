"""A small model with a byte-level tokenizer; a tokenizer service before a fake scheduler."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.common.fingerprint import text_fingerprint
from services.common.lifecycle import Lifecycle
from services.common.pb import tokenizer_pb2_grpc
from services.common.rpc import RpcServer, connect
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.encode import Encoder
from services.tokenizer.kvstore_client import KvStoreClient
from services.tokenizer.prompt import PromptReader
from services.tokenizer.scheduler_client import SchedulerClient
from services.tokenizer.service import TokenizerService
from tests.fakes.scheduler import FakeScheduler, Script, engine_state

MODEL = "tiny"
EOS = "<|im_end|>"
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
CORPUS = ["hello world, how are you today? The stop is here; the end comes soon."] * 8


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose tokenizer has every byte, some merges and three special tokens."""
    folder = tmp_path_factory.mktemp("models") / MODEL
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": size + 8, "eos_token_id": 2}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return folder


@pytest.fixture(scope="session")
def encoder(model_dir: Path) -> Encoder:
    """The tokenizer of ``model_dir``."""
    return Encoder(model_dir, num_threads=1)


@dataclass
class Rig:
    """A tokenizer service before fake schedulers.

    Attributes:
        stub: A client of it.
        fake: The first scheduler.
        life: Of the service.
    """

    stub: tokenizer_pb2_grpc.TokenizerAsyncStub
    fakes: list[FakeScheduler]
    encoder: Encoder
    service: TokenizerService
    schedulers: SchedulerClient
    life: Lifecycle

    @property
    def fake(self) -> FakeScheduler:
        return self.fakes[0]

    def ids(self, text: str) -> list[int]:
        return self.encoder.encode_now(text, add_special_tokens=False, param="text")


@asynccontextmanager
async def rig_of(
    model_dir: Path,
    fakes: list[FakeScheduler],
    *,
    addresses: list[str],
    kvstores: list[str] | None = None,
    silence_s: float = 5.0,
    trust_request_template: bool = False,
) -> AsyncIterator[Rig]:
    """Run a tokenizer service before schedulers that are already there."""
    encoder = Encoder(model_dir, num_threads=1)
    text_fp = text_fingerprint(model_dir)
    schedulers = SchedulerClient(
        addresses, text_fp=text_fp, cluster_token=None, silence_s=silence_s
    )
    kvstore = KvStoreClient(kvstores or [], cluster_token=None)
    life = Lifecycle()
    prompts = PromptReader(
        encoder, ChatTemplates.load(model_dir), trust_request_template=trust_request_template
    )
    service = TokenizerService(
        model=MODEL,
        text_fp=text_fp,
        encoder=encoder,
        prompts=prompts,
        schedulers=schedulers,
        kvstore=kvstore,
        life=life,
        max_choices=8,
    )
    server = RpcServer(host="127.0.0.1", port=0, cluster_token=None)
    server.add(tokenizer_pb2_grpc.add_TokenizerServicer_to_server, service, "Tokenizer")
    async with schedulers.running(), kvstore.running():
        channel = connect(await server.start(), cluster_token=None)
        try:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            yield Rig(stub, fakes, encoder, service, schedulers, life)
        finally:
            await channel.close()
            await server.stop(grace_s=0)
            encoder.close()


MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def make_rig(model_dir: Path) -> MakeRig:
    """Make a service before one fake scheduler that answers with a script, ready for requests."""

    @asynccontextmanager
    async def make(
        answer: Script, *, silence_s: float = 5.0, **options: object
    ) -> AsyncIterator[Rig]:
        engine = engine_state(text_fp=text_fingerprint(model_dir))
        fake = FakeScheduler(answer, [engine], **options)  # type: ignore[arg-type]
        async with (
            fake.serving() as address,
            rig_of(model_dir, [fake], addresses=[address], silence_s=silence_s) as rig,
        ):
            await until_ready(rig)
            yield rig

    return make


async def until_ready(rig: Rig, *, ready: bool = True) -> None:
    """Wait until requests would be taken, or would not."""
    while bool(rig.service.not_ready_reason()) is ready:
        await rig.schedulers.changed.wait(timeout_s=5.0)
