"""Reads position-embedding parameters in both of Hugging Face's spellings.

Since transformers 5 there is one object ``rope_parameters``; before, ``rope_theta`` and
``partial_rotary_factor`` stood beside an optional ``rope_scaling``.
"""

from __future__ import annotations

from services.common.errors import ConfigError
from services.worker.models._hf_config import HfConfig
from services.worker.models.base import RopeConfig

_DEFAULT_THETA = 10_000.0
_SUPPORTED = ("default", "linear", "llama3")


def read_rope(raw: HfConfig, *, head_size: int, max_positions: int) -> RopeConfig:
    """Read the parameters.

    Args:
        raw: config.json.
        head_size: Elements of a head.
        max_positions: The model's ``max_position_embeddings``.

    Raises:
        ConfigError: A type or key that is not supported, by name.
    """
    theta = raw.number("rope_theta", _DEFAULT_THETA)
    partial = raw.number("partial_rotary_factor", 1.0)
    scaling = raw.section("rope_scaling")
    parameters = raw.section("rope_parameters") or scaling
    if parameters is None:
        return RopeConfig("default", theta=theta, rotary_dim=int(head_size * partial))
    theta = parameters.number("rope_theta", theta)
    partial = parameters.number("partial_rotary_factor", partial)
    rope = _read_scaled(
        parameters,
        theta=theta,
        rotary_dim=int(head_size * partial),
        max_positions=max_positions,
    )
    if parameters.unread:
        raise ConfigError(
            f"config.json: rope parameter {parameters.unread[0]!r} is not supported"
            f" with type {rope.rope_type!r}"
        )
    return rope


def _read_scaled(
    parameters: HfConfig, *, theta: float, rotary_dim: int, max_positions: int
) -> RopeConfig:
    legacy_type = parameters.text("type", "default")
    rope_type = parameters.text("rope_type", legacy_type)
    match rope_type:
        case "default":
            return RopeConfig("default", theta=theta, rotary_dim=rotary_dim)
        case "linear":
            factor = parameters.number("factor")
            return RopeConfig("linear", theta=theta, rotary_dim=rotary_dim, factor=factor)
        case "llama3":
            return RopeConfig(
                "llama3",
                theta=theta,
                rotary_dim=rotary_dim,
                factor=parameters.number("factor"),
                low_freq_factor=parameters.number("low_freq_factor"),
                high_freq_factor=parameters.number("high_freq_factor"),
                original_max_position_embeddings=parameters.integer(
                    "original_max_position_embeddings", max_positions
                ),
            )
    raise ConfigError(
        f"config.json: rope type {rope_type!r} is not supported; supported: {', '.join(_SUPPORTED)}"
    )
