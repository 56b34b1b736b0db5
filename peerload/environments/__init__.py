"""Environments of tasks (`--env`): reading of lock files in the client, and the programs with which a node builds them."""
