"""Simulator of policies: the decisions of `peerload.core` on an event heap with a simulated clock."""
