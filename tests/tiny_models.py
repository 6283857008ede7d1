"""Tiny random models in Hugging Face's format, made in milliseconds without torch or transformers.

Weights are drawn so that logits spread over tens of units and depend on the whole context: a wrong
position, mask or bias shows, and ties do not decide. With a tokenizer the directory can be served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = SPECIAL_TOKENS.index("<|im_end|>")
BOS_TOKEN_ID = SPECIAL_TOKENS.index("<|im_start|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}

_FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
}

_STORED_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? "
    "Answer in one word. One, two, three, four, five, and so on until the end of the line. "
)


def make_tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    dtype: str = "float32",
    num_shards: int = 1,
    seed: int = 0,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random model.

    Args:
        directory: Made if it does not exist.
        family: "llama", "mistral", "qwen2" or "qwen3".
        dtype: Of the stored weights: "float32", "bfloat16" or "float16".
        num_shards: Files that the weights are spread over; more than one comes with an index.
        seed: Of the weights.
        tokenizer: Also write tokenizer.json (byte-level BPE, 320 tokens), its config, and a chat
            template, so that the whole system can serve the directory.
        **overrides: Keys of config.json; ``None`` is written as null.

    Returns:
        ``directory``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        **_CONFIG,
        **_FAMILY_CONFIG[family],
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "dtype": dtype,
        **overrides,
    }
    _write_json(directory / "config.json", config)
    generation = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": config["eos_token_id"]}
    _write_json(directory / "generation_config.json", generation)
    tensors = random_tensors(config, seed=seed)
    write_weights(directory, tensors, dtype=dtype, num_shards=num_shards)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def random_tensors(config: dict[str, Any], *, seed: int) -> dict[str, np.ndarray]:
    """Weights for a config, by checkpoint name, in float32."""
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, shape) for name, shape in tensor_shapes(config)}


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Checkpoint name and shape of every tensor that a config asks for."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def write_weights(
    directory: Path, tensors: dict[str, np.ndarray], *, dtype: str = "float32", num_shards: int = 1
) -> None:
    """Write tensors as ``model.safetensors``, or as shards with an index."""
    names = list(tensors)
    shards = [names[start::num_shards] for start in range(num_shards)]
    files = [
        "model.safetensors"
        if num_shards == 1
        else f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        for number in range(num_shards)
    ]
    for file, shard in zip(files, shards, strict=True):
        _write_safetensors(directory / file, {name: tensors[name] for name in shard}, dtype=dtype)
    if num_shards > 1:
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        }
        index = {"metadata": {}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer that can encode any text, and a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_CONFIG["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
            "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
            "pad_token": SPECIAL_TOKENS[0],
            "model_max_length": _CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )


def _layer_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    family = config["model_type"]
    attention_bias = bool(config.get("attention_bias", False))
    qkv_bias = family == "qwen2" or attention_bias
    projections = (
        ("self_attn.q_proj", query, hidden, qkv_bias),
        ("self_attn.k_proj", key_value, hidden, qkv_bias),
        ("self_attn.v_proj", key_value, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, query, attention_bias),
        ("mlp.gate_proj", inner, hidden, bool(config.get("mlp_bias", False))),
        ("mlp.up_proj", inner, hidden, bool(config.get("mlp_bias", False))),
        ("mlp.down_proj", hidden, inner, bool(config.get("mlp_bias", False))),
    )
    for name, out_size, in_size, has_bias in projections:
        yield f"{name}.weight", (out_size, in_size)
        if has_bias:
            yield f"{name}.bias", (out_size,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if family == "qwen3":
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.5 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return 0.5 * noise
    return noise * np.float32(1.5 / np.sqrt(shape[-1]))


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray], *, dtype: str) -> None:
    """Write the format: header length (u64), header (JSON), then the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    words = {name: _stored(array, dtype) for name, array in tensors.items()}
    end = 0
    for name, array in words.items():
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _STORED_NAMES[dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in words.values():
            file.write(array.tobytes())


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    array = np.ascontiguousarray(array, dtype=np.float32)
    return _as_bfloat16(array) if dtype == "bfloat16" else array.astype(dtype)


def _as_bfloat16(array: np.ndarray) -> np.ndarray:
    """Upper halves of the float32 words, rounded to nearest, ties to even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
