"""The engine in one process, for scripts: the same scheduler core, runner and text path, no gRPC.

>>> from services.offline import LLM, Job                                  # doctest: +SKIP
>>> with LLM("smollm2") as llm:                                            # doctest: +SKIP
...     print(llm.chat([[{"role": "user", "content": "Hi"}]])[0].choices[0].text)
...     haiku, joke = llm.run([Job(prompt="A haiku:", n=3), Job(prompt="A joke:")])
"""

from services.offline.jobs import Choice, EndsHere, Job, Output, Prompt
from services.offline.llm import LLM
from services.offline.options import LLMOptions
from services.offline.trace import Trace

__all__ = ["LLM", "Choice", "EndsHere", "Job", "LLMOptions", "Output", "Prompt", "Trace"]
