"""Environments of tasks (`--env`): lock files as they are read by a client, and the programs with which a node builds them."""
