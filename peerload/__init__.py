"""peerload: many machines as one, without a head node."""

__version__ = "0.1.0"
