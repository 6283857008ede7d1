"""Keys of KV blocks: the same in every process, for ever.

``root = SHA-256(frame("sluiceway/1", weights revision, adapter digest or "", cache_namespace))``
where ``frame`` writes each field as its length (u32, little-endian) and its bytes;
``key_i = SHA-256(parent + ids of the full block as little-endian u32 + frame(extra) if any)[:16]``
where ``parent`` is ``key_{i-1}``, or the whole root for the first block.

Block size, dtype and layout are not part of a key: they belong to the engine that holds the block.

Test vectors (revision ``"r"``, no adapter, namespace ``""``, block size 4):

>>> root = root_key("r")
>>> root.hex()[:32]
'641c6ca84b884fe4be6405fad51c6a08'
>>> [key.hex() for key in block_keys(root, [1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)]
['bd2ab4fba142b0476a7b12ecf3284157', '1c09808216647799b391b300041d60d4']
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from struct import pack

KEY_SIZE_BYTES = 16
_SAFETENSORS_HEADER_LIMIT = 100 << 20


def frame(*fields: str | bytes) -> bytes:
    """Concatenate fields so that no two lists of fields give the same bytes."""
    raw = [field.encode() if isinstance(field, str) else field for field in fields]
    return b"".join(pack("<I", len(field)) + field for field in raw)


def root_key(revision: str, *, adapter_digest: str = "", cache_namespace: str = "") -> bytes:
    """Parent of the first block: 32 bytes.

    Args:
        revision: Weights revision (see ``directory_revision``).
        adapter_digest: Digest of the adapter; "" for the base model.
        cache_namespace: Requests of different namespaces never share blocks.
    """
    return hashlib.sha256(frame("sluiceway/1", revision, adapter_digest, cache_namespace)).digest()


def block_key(parent: bytes, token_ids: Sequence[int], *, extra: Sequence[bytes] = ()) -> bytes:
    """Key of one full block: 16 bytes.

    Args:
        parent: Key of the block before, or the root key.
        token_ids: The block's tokens; exactly block_size of them.
        extra: What else decides the block's content (multimodal hashes).
    """
    ids = array("I", token_ids).tobytes()
    tail = frame(*extra) if extra else b""
    return hashlib.sha256(parent + ids + tail).digest()[:KEY_SIZE_BYTES]


def block_keys(root: bytes, token_ids: Sequence[int], *, block_size: int) -> list[bytes]:
    """Keys of all full blocks of a token sequence, in order."""
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys


def directory_revision(directory: Path) -> str:
    """Weights revision of a local model directory, as hex.

    SHA-256 over sorted file names, sizes and the safetensors headers: cheap, and different for
    different weights layouts. Only files that define the model count (``*.safetensors``,
    ``*.json``, ``*.jinja``).
    """
    digest = hashlib.sha256()
    patterns = ("*.safetensors", "*.json", "*.jinja")
    for path in sorted(path for pattern in patterns for path in directory.glob(pattern)):
        digest.update(frame(path.name, str(path.stat().st_size)))
        if path.suffix == ".safetensors":
            digest.update(_safetensors_header(path))
    return digest.hexdigest()


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, _SAFETENSORS_HEADER_LIMIT))
