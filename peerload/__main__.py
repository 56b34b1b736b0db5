"""`python -m peerload` is the same as `peerload`."""

from __future__ import annotations

import sys

from peerload.cli.main import process

if __name__ == "__main__":
    sys.exit(process())
