"""The decisions of one node, free of clock, chance and I/O: `Node.handle(now, event) -> actions`."""
