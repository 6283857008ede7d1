"""The wire contract: stubs are fresh, and what is promised about the messages holds."""

import subprocess
import sys
from pathlib import Path

from services.common.pb import scheduler_pb2, tokenizer_pb2, worker_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_are_what_generate_writes(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "proto/generate.py", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    fresh = {path.name: path.read_text() for path in tmp_path.rglob("*_pb2*")}
    committed = {
        path.name: path.read_text() for path in (ROOT / "services/common/pb").glob("*_pb2*")
    }
    assert fresh == committed


def test_bytes_of_a_step_are_the_same_as_the_message_itself() -> None:
    """EngineFrame.step is `bytes` so that the I/O loop need not parse it; the wire is the same."""
    step = worker_pb2.ScheduledStep(step=7, handle=[1], num_tokens=[3])
    frame = worker_pb2.EngineFrame(step=step.SerializeToString())
    again = worker_pb2.EngineFrame.FromString(frame.SerializeToString())
    assert worker_pb2.ScheduledStep.FromString(again.step) == step


def test_every_sampling_number_has_presence() -> None:
    """proto3's zero must never be taken for a default."""
    from services.common.pb import common_pb2

    for field in common_pb2.SamplingParams.DESCRIPTOR.fields:
        if not field.is_repeated and field.message_type is None:
            assert field.has_presence, field.name


def test_fields_for_later_features_are_reserved() -> None:
    """Numbers kept for adapters, multimodal items and drafts are not used by accident."""
    kept = {
        tokenizer_pb2.GenerateRequest: range(31, 40),
        scheduler_pb2.Add: range(31, 40),
        worker_pb2.NewRequest: range(21, 30),
        worker_pb2.ScheduledStep: range(20, 30),
        worker_pb2.StepResult: range(21, 30),
    }
    for message, reserved in kept.items():
        numbers = {field.number for field in message.DESCRIPTOR.fields}
        assert not numbers & set(reserved)
