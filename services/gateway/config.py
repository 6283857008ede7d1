"""Settings of the gateway."""

from __future__ import annotations

from pydantic import Field

from services.common.config import ServiceConfig


class GatewayConfig(ServiceConfig):
    """What the gateway can be told."""

    port: int = Field(
        8000,
        ge=0,
        le=65535,
        description="Port of the HTTP API, /health and /metrics; 0 = any free one.",
    )
    http_port: int = Field(
        0, ge=0, le=65535, description="Not used by the gateway: its /metrics is on --port."
    )
    tokenizers: tuple[str, ...] = Field(
        ("127.0.0.1:50051",),
        description=(
            "Addresses of the tokenizers, host:port or dns:///name:port; calls go round robin."
        ),
    )
    api_key: tuple[str, ...] = Field(
        (),
        description=(
            "Keys that clients may use, in clear or as sha256:<hex of the key>; none = open to all."
        ),
        repr=False,
    )
    allowed_origins: tuple[str, ...] = Field(
        (), description="Origins that browsers may call from (CORS), or *; none = CORS is off."
    )
    max_in_flight: int = Field(
        1024, ge=1, description="Requests that are served at one time; beyond it clients get 429."
    )
    max_in_flight_per_key: int | None = Field(
        None, ge=1, description="Requests of one API key at one time; not set = any number."
    )
    max_tokens_per_minute_per_key: int | None = Field(
        None,
        ge=1,
        description="Prompt and output tokens of one API key per minute; not set = any number.",
    )
    max_body_bytes: int = Field(
        16 << 20, ge=1024, description="Largest request body in bytes; beyond it clients get 413."
    )
    max_n: int = Field(128, ge=1, description="Most choices (n) of one prompt.")
    max_choices: int = Field(
        1024, ge=1, description="Most choices of one request: prompts times n."
    )
    max_stored_responses: int = Field(
        4096,
        ge=1,
        description="Responses (POST /v1/responses) that are kept in memory; older ones go.",
    )
    max_stored_response_bytes: int = Field(
        256 << 20, ge=1024, description="Most bytes of kept responses; older ones go."
    )
    stored_response_ttl_s: float = Field(
        86_400.0, gt=0, description="How long a response is kept, in seconds."
    )
    trust_request_chat_template: bool = Field(
        False,
        description=(
            "Whether a request may bring its own chat template, which can burn any amount of CPU."
        ),
    )
    tool_call_parser: str = Field(
        "auto",
        description=(
            "How the model writes tool calls: hermes, qwen3, llama3_json, mistral, pythonic; "
            "auto = by its name; none = not known."
        ),
    )
    reasoning_parser: str = Field(
        "auto",
        description=(
            "How the model marks what it thinks: deepseek_r1 (the prompt opens the thought), qwen3 "
            "(the model does); auto = by its name; none = not at all."
        ),
    )
