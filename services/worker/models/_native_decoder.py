"""The decoder's forward pass as one call of the native library.

Between the matrix products of a step in torch lie some twenty small operations a layer, each of
which costs Python, an allocation and often a parallel region: on a decode step they took as long as
the products. See csrc/decoder.cpp for what is computed; ``_decoder.py`` is the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.attention.native_cpu import AttentionArguments
from services.worker.layers.native_linear import NativeLinear
from services.worker.models.base import ModelConfig
from services.worker.native.library import Library


class _Layer(ctypes.Structure):
    """``DecoderLayer`` of csrc/decoder.cpp."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class _Decoder(ctypes.Structure):
    """``Decoder`` of csrc/decoder.cpp."""

    _fields_ = (
        ("num_layers", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("frequencies", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
    )


class _Step(ctypes.Structure):
    """``DecoderStep`` of csrc/decoder.cpp."""

    _fields_ = (
        ("input_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("kv_caches", ctypes.POINTER(ctypes.c_void_p)),
        ("values_offset", ctypes.c_int64),
        ("attention", ctypes.POINTER(AttentionArguments)),
        ("hidden", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer: addresses of packed linears, and weights of its norms.

    Attributes:
        qkv: Fused projection, ``NativeLinear.handle``.
        out: Attention's output projection.
        gate_up: Fused and gated.
        down: The MLP's output projection.
        norms: Before attention, before the MLP: ``[hidden_size]``.
        head_norms: Of queries and of keys, ``[head_size]``; ``None`` without.
        window: See ``ModelConfig.sliding_windows``.
    """

    qkv: int
    out: int
    gate_up: int
    down: int
    norms: tuple[torch.Tensor, torch.Tensor]
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int | None


class NativeDecoder:
    """All layers of a model, from token ids to the normalised hidden state.

    What it is made of must outlive it: it holds addresses.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[NativeLayer],
        *,
        frequencies: torch.Tensor,
        embedding: torch.Tensor | NativeLinear,
        norm: torch.Tensor,
        library: Library,
    ) -> None:
        """
        Args:
            config: The model's numbers.
            layers: One per layer.
            frequencies: ``[rotary_dim / 2]`` float32, radians per position.
            embedding: The table ``[vocab_size, hidden_size]``, or the native linear that looks it
                up.
            norm: Weight of the final norm, ``[hidden_size]``; its dtype is the model's.
            library: Where the kernels are.
        """
        self._layers = (_Layer * len(layers))(*(_layer_of(layer) for layer in layers))
        self._decoder = _Decoder(
            num_layers=len(layers),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            rotary_dim=config.rope.rotary_dim,
            is_bf16=norm.dtype == torch.bfloat16,
            eps=config.rms_norm_eps,
            scale=config.head_size**-0.5,
            frequencies=frequencies.data_ptr(),
            embedding=None if isinstance(embedding, NativeLinear) else embedding.data_ptr(),
            head=embedding.handle if isinstance(embedding, NativeLinear) else None,
            norm=norm.data_ptr(),
            layers=self._layers,
        )
        self._hidden_size = config.hidden_size
        self._dtype = norm.dtype
        self._forward = library.function(
            "sl_decoder_forward", [ctypes.POINTER(_Decoder), ctypes.POINTER(_Step)]
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        kv_caches: Sequence[torch.Tensor],
        batch: AttentionArguments,
    ) -> torch.Tensor:
        """See ``CausalLM.forward``.

        Args:
            input_ids: ``[num_tokens]`` int64.
            positions: ``[num_tokens]`` int64.
            kv_caches: One tensor per layer.
            batch: What the native attention backend made of the step.
        """
        hidden = torch.empty(len(input_ids), self._hidden_size, dtype=self._dtype)
        first = kv_caches[0]
        step = _Step(
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            kv_caches=(ctypes.c_void_p * len(kv_caches))(*(t.data_ptr() for t in kv_caches)),
            values_offset=first.stride(0) * first.itemsize,
            attention=ctypes.pointer(batch),
            hidden=hidden.data_ptr(),
        )
        self._forward(self._decoder, step)
        return hidden


def _layer_of(layer: NativeLayer) -> _Layer:
    query_norm, key_norm = layer.head_norms or (None, None)
    return _Layer(
        qkv=layer.qkv,
        out=layer.out,
        gate_up=layer.gate_up,
        down=layer.down,
        attention_norm=layer.norms[0].data_ptr(),
        mlp_norm=layer.norms[1].data_ptr(),
        query_norm=None if query_norm is None else query_norm.data_ptr(),
        key_norm=None if key_norm is None else key_norm.data_ptr(),
        window=layer.window or 0,
    )
