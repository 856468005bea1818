"""`python -m yalis`, for where the yalis command is not on the path."""

from __future__ import annotations

import sys

from yalis.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
