"""The shipped policies, one per file; they see `peerload.policy` and `peerload.model` and nothing else."""
