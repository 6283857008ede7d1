"""``python -m services.kvstore``."""

import sys

from services.common.lifecycle import run_service
from services.kvstore.config import KvStoreConfig
from services.kvstore.service import serve

if __name__ == "__main__":
    sys.exit(run_service(KvStoreConfig, section="kvstore", serve=serve))
