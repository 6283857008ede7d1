"""``python -m services.gateway``."""

import sys

from services.common.lifecycle import run_service
from services.gateway.config import GatewayConfig
from services.gateway.server import serve

if __name__ == "__main__":
    sys.exit(run_service(GatewayConfig, section="gateway", serve=serve))
