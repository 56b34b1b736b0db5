"""peerload from Python: `Client`, `AsyncClient` and `Executor`, to be had from `peerload` itself."""
