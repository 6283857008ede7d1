"""What one step gave, on the host, in columns as they go over the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.errors import SluicewayError
from services.worker.runner.step_input import Floats, Ints
from services.worker.sampling.logprobs import LogprobColumns


@dataclass(frozen=True, slots=True)
class PromptLogprobChunk:
    """Log-probabilities of the prompt tokens ``start : start + len(token_ids)`` of one request."""

    handle: int
    start: int
    token_ids: Ints
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Rows in any order; row i sampled ``num_sampled[i]`` of the flat ``token_ids``.

    Attributes:
        step: The step's number.
        handles: Every handle that the step named to run.
        num_sampled: 0 for a partial prefill, for an unknown row and for one whose end is known.
        token_ids: Flat.
        logprobs: Of the sampled tokens that wanted them; ``None`` if none did.
        logprob_positions: Which of ``token_ids`` each entry of ``logprobs`` describes.
        prompt_logprobs: Chunks of prompts that were computed in this step.
        row_errors: Why rows failed, by handle; such a row has sampled nothing and never will again.
        pooled: ``[hidden_size]`` float32 by handle, of rows that pool and whose prompt is computed.
        device_s: Time in forward and sampling.
        num_tokens: Tokens that went through the model.
    """

    step: int
    handles: list[int]
    num_sampled: list[int]
    token_ids: list[int]
    logprobs: LogprobColumns | None = None
    logprob_positions: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobChunk] = field(default_factory=list)
    row_errors: dict[int, SluicewayError] = field(default_factory=dict)
    pooled: dict[int, Floats] = field(default_factory=dict)
    device_s: float = 0.0
    num_tokens: int = 0
