"""``python -m services.scheduler``."""

import sys

from services.common.lifecycle import run_service
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import serve

if __name__ == "__main__":
    sys.exit(run_service(SchedulerConfig, section="scheduler", serve=serve))
