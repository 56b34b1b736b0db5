"""Joining a cluster: join server, enrollment, distribution of what the CA has signed."""
