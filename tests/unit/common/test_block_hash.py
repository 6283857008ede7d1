"""Block keys are the same in every process and differ whenever content or namespace does."""

import doctest
import json
import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.common import block_hash
from services.common.block_hash import block_keys, directory_revision, frame, root_key

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_the_documented_vectors_hold() -> None:
    assert doctest.testmod(block_hash).failed == 0


@given(IDS, st.integers(1, 20))
def test_only_full_blocks_have_keys(ids: list[int], block_size: int) -> None:
    assert len(block_keys(root_key("r"), ids, block_size=block_size)) == len(ids) // block_size


@given(IDS, IDS)
def test_keys_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int]) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    keys_a = block_keys(root_key("r"), a, block_size=4)
    keys_b = block_keys(root_key("r"), b, block_size=4)
    equal = [x == y for x, y in zip(keys_a, keys_b, strict=False)]
    assert equal == [i < common // 4 for i in range(len(equal))]


def test_revision_adapter_and_namespace_separate_roots() -> None:
    roots = {
        root_key("r"),
        root_key("s"),
        root_key("r", adapter_digest="a"),
        root_key("r", cache_namespace="a"),
    }
    assert len(roots) == 4


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_frames_of_different_fields_differ(a: list[bytes], b: list[bytes]) -> None:
    assert (frame(*a) == frame(*b)) == (a == b)


def test_a_directory_has_a_revision_that_follows_its_headers(tmp_path: Path) -> None:
    def write(header: dict[str, object]) -> str:
        raw = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
        return directory_revision(tmp_path)

    first = write({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    assert first == directory_revision(tmp_path)
    assert first != write({"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
