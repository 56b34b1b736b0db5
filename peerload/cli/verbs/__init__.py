"""The verbs of `peerload`: small ones of one kind share a file. `cli/main.py` has the table of them, and imports a file when
its verb is run."""
