"""``python -m services.pull NAME [--cache-dir DIR]``."""

import sys

from services.pull.command import main

if __name__ == "__main__":
    sys.exit(main())
