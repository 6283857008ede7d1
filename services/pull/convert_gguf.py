"""Converts a GGUF file into a Hugging Face directory in bf16; the only user of transformers here.

Run by ``packaged`` in a process of its own, which ends with its parent:
``python -m services.pull.convert_gguf FILE OUT_DIR PARENT_PID``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from services.common.lifecycle import die_with_parent
from services.pull.progress import Progress, to_line

_FILE_MODE = 0o644


def convert(gguf: Path, out: Path) -> None:
    """Write config, tokenizer, chat template and weights of a GGUF model.

    Args:
        gguf: The file; packed weights are unpacked to bf16.
        out: Directory to make.
    """
    # Loaded by name: type checking transformers would take minutes and tell us nothing.
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    _tell(0.2)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    _tell(0.4)
    # Without `dequantize` the model stays packed and cannot be saved.
    unpack = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=unpack
    )
    _tell(0.8)
    model.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(_FILE_MODE)  # weights are written for their owner alone; containers share them
    _tell(1.0)


def _tell(fraction: float) -> None:
    sys.stdout.write(to_line(Progress("convert", fraction)) + "\n")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
