"""The verbs of `peerload`. Related small verbs share a file. `cli/main.py` has their table, and imports a file when
its verb is run."""
