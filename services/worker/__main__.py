"""``python -m services.worker``: runs the worker service."""

from __future__ import annotations

import sys

from services.common.lifecycle import run_service
from services.worker.config import WorkerConfig
from services.worker.service import serve

if __name__ == "__main__":
    sys.exit(run_service(WorkerConfig, section="worker", serve=serve))
