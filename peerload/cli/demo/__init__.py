"""`peerload demo`: a broker, example tasks, a report, and simulated GPUs."""
