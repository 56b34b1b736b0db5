"""The live view of the cluster."""
