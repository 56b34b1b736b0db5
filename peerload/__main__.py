"""`python -m peerload` is the same as `peerload`."""

from __future__ import annotations

import sys

from peerload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
