"""``python -m services.worker``: runs the worker service."""

from __future__ import annotations

import sys

from services.common.lifecycle import Lifecycle, run_service
from services.worker.config import WorkerConfig
from services.worker.openmp import limit_spinning


async def serve(config: WorkerConfig, life: Lifecycle) -> None:
    """Run the worker; see ``service.serve``."""
    limit_spinning(config.omp_spin_count)
    # Only now: this loads torch, and OpenMP with it.
    from services.worker.service import serve

    await serve(config, life)


if __name__ == "__main__":
    sys.exit(run_service(WorkerConfig, section="worker", serve=serve))
