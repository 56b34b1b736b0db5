"""`peerload demo`: a broker, work to do, a report, and imagined GPUs."""
