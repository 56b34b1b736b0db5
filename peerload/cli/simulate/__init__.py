"""`peerload sim`: flags, comparison, plots and reports."""
