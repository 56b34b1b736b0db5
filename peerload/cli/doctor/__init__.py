"""Checks of `peerload doctor`."""
