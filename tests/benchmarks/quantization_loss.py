"""What weights in few bits cost in quality: perplexity, and how often the likeliest token stays.

    python -m tests.benchmarks.quantization_loss [--model smollm2] [--tokens 50000] ...

The text is what Python and Debian ship: pydoc's topics and the common licences, half of the tokens
from each, in windows that each start without context. A token's likeliest successor is compared
with that of the weights as they are, over the same text ("teacher-forced"); of every tenth window
the first half is also continued greedily by both, until they differ.

The packaged model was itself made from 4-bit weights (ggml's Q4_1), which int4 finds again exactly:
that says nothing of other models. ``--off-grid`` measures a model of the same function whose
weights lie on nobody's grid: random factors are multiplied into what each linear layer reads, and
divided out of its weights.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from services.pull import ensure_model
from services.tokenizer.encode import Encoder
from services.worker.loader.load_model import LoadedModel, load_model
from services.worker.native.library import load_library
from tests.unit.worker.models.paged_forward import CPU, PagedForward

WINDOW = 512
BLOCK_SIZE = 16
LICENSES = Path("/usr/share/common-licenses")


@dataclass(frozen=True)
class Scores:
    """Of one way to keep the weights.

    Attributes:
        nats: Negative log-likelihood of each token, natural logarithm.
        likeliest: The likeliest token in each place.
    """

    nats: torch.Tensor
    likeliest: torch.Tensor

    @property
    def perplexity(self) -> float:
        """e to the mean."""
        return math.exp(self.nats.mean().item())


def pydoc_topics() -> str:
    """Chapters of Python's language reference."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def licenses() -> str:
    """Texts of the common licences, each once (some names are links)."""
    files = sorted({path.resolve() for path in LICENSES.iterdir()})
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def windows_of(model_dir: Path, *, num_tokens: int) -> list[list[int]]:
    """Windows of token ids, as many of each text."""
    encoder = Encoder(model_dir, num_threads=1)
    try:
        halves = [
            encoder.encode_now(text, add_special_tokens=False, param="text")
            for text in (pydoc_topics(), licenses())
        ]
    finally:
        encoder.close()
    windows = []
    for ids in halves:
        wanted = min(math.ceil(num_tokens / 2 / WINDOW), len(ids) // WINDOW)
        windows += [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(wanted)]
    return windows


def write_off_grid(model_dir: Path, target: Path, *, spread: float = 0.35) -> Path:
    """Write a Llama of the same function with other weights, in float32.

    Args:
        model_dir: One file of weights, no biases.
        target: An empty folder.
        spread: Factors are e to the power of -spread to spread, drawn evenly.

    Returns:
        ``target``.
    """
    config = json.loads((model_dir / "config.json").read_text())
    tensors = {k: v.float() for k, v in load_file(model_dir / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)

    def factors(size: int) -> torch.Tensor:
        return torch.exp((torch.rand(size, generator=generator) * 2 - 1) * spread)

    num_kv_heads = config["num_key_value_heads"]
    group_size = config["num_attention_heads"] // num_kv_heads
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        q, k, v, o = (tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkvo")
        gate, up, down = (
            tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        for norm, readers in (
            ("input_layernorm", (q, k, v)),
            ("post_attention_layernorm", (gate, up)),
        ):
            scale = factors(config["hidden_size"])
            tensors[f"{prefix}{norm}.weight"].mul_(scale)
            for reader in readers:
                reader.div_(scale)
        scale = factors(len(up))
        up.mul_(scale[:, None])
        down.div_(scale)
        scale = factors(len(v))
        v.mul_(scale[:, None])
        o.div_(scale.view(num_kv_heads, -1).repeat_interleave(group_size, dim=0).flatten())
    for path in model_dir.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).symlink_to(path.resolve())
    save_file(tensors, target / "model.safetensors")
    return target


def load(model_dir: Path, quantization: str | None) -> LoadedModel:
    """Load with the machine's native kernels."""
    return load_model(
        model_dir,
        dtype="bfloat16",
        device=CPU,
        attention_backend="auto",
        block_size=BLOCK_SIZE,
        report=lambda done, total: None,
        library=load_library(),
        quantization=quantization,
    )


def score(loaded: LoadedModel, windows: list[list[int]]) -> Scores:
    """Run every window through the model."""
    nats, likeliest = [], []
    for window in windows:
        (logits,) = PagedForward(loaded, [window], block_size=BLOCK_SIZE).step([len(window)])
        nats.append(
            functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="none")
        )
        likeliest.append(logits[:-1].argmax(-1))
    return Scores(torch.cat(nats), torch.cat(likeliest))


def continuations(
    loaded: LoadedModel, windows: list[list[int]], *, num_tokens: int
) -> Iterator[list[int]]:
    """Greedy continuations of the first halves."""
    for window in windows:
        prompt = window[: WINDOW // 2]
        forward = PagedForward(loaded, [prompt + [0] * num_tokens], block_size=BLOCK_SIZE)
        (logits,) = forward.step([len(prompt)])
        ids: list[int] = []
        for place in range(num_tokens):
            ids.append(int(logits[-1].argmax()))
            forward.put(0, len(prompt) + place, ids[-1])
            (logits,) = forward.step([1])
        yield ids


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--methods", nargs="+", default=["int8", "int4"])
    parser.add_argument("--off-grid", action="store_true")
    parser.add_argument("--continue-tokens", type=int, default=64)
    options = parser.parse_args()
    model_dir = ensure_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        if options.off_grid:
            model_dir = write_off_grid(model_dir, Path(folder))
        measure(
            model_dir,
            methods=options.methods,
            num_tokens=options.tokens,
            num_continued=options.continue_tokens,
        )


def measure(
    model_dir: Path, *, methods: Sequence[str], num_tokens: int, num_continued: int
) -> None:
    """Print a row for the weights as they are and one for each method."""
    windows = windows_of(model_dir, num_tokens=num_tokens)
    print(f"{sum(map(len, windows))} tokens in windows of {WINDOW}")
    print("| weights | perplexity | loss | likeliest token is the same | greedy tokens in common |")
    print("|---|---|---|---|---|")
    plain: Scores | None = None
    plain_texts: list[list[int]] = []
    for method in (None, *methods):
        loaded = load(model_dir, method)
        scores = score(loaded, windows)
        texts = list(continuations(loaded, windows[::10], num_tokens=num_continued))
        if plain is None:
            plain, plain_texts = scores, texts
        loss = scores.perplexity / plain.perplexity - 1
        same = (scores.likeliest == plain.likeliest).double().mean().item()
        lengths = [common_length(a, b) for a, b in zip(texts, plain_texts, strict=True)]
        print(
            f"| {method or 'bfloat16'} | {scores.perplexity:.3f} | {loss:+.2%} | {same:.2%} |"
            f" {sum(lengths) / len(lengths):.1f} of {num_continued} |",
            flush=True,
        )


def common_length(a: list[int], b: list[int]) -> int:
    """Tokens that two lists have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


if __name__ == "__main__":
    main()
