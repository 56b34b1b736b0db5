"""The live view of the cluster (`peerload top`)."""
