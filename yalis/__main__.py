"""`python -m yalis`, for environments where the yalis command is not on the PATH."""

from __future__ import annotations

import sys

from yalis.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
