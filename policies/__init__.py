"""The shipped policies. They import only `peerload.policy` and `peerload.model`."""
