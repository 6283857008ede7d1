"""Generate: text and ids go in, merged deltas come out, each choice ends once."""

from __future__ import annotations

from services.common.pb import common_pb2, tokenizer_pb2
from tests.fakes.scheduler import Answer
from tests.unit.tokenizer.conftest import MODEL, MakeRig


def request(**fields: object) -> tokenizer_pb2.GenerateRequest:
    message = tokenizer_pb2.GenerateRequest(model=MODEL, **fields)  # type: ignore[arg-type]
    message.key.request_id = "r1"
    return message


async def test_a_text_prompt_is_answered_with_the_text_of_the_tokens(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer(add.prompt_ids)) as rig:
        deltas = [delta async for delta in rig.stub.Generate(request(text="hello world"))]
    first = deltas[0]
    assert first.has_prompt
    assert list(first.prompt_ids) == rig.ids("hello world")
    assert "".join(c.text for d in deltas for c in d.choices) == "hello world"
    last = deltas[-1].choices[0]
    assert last.finish.reason == common_pb2.FINISH_REASON_LENGTH
    assert last.finish.usage.output_tokens == len(first.prompt_ids)
