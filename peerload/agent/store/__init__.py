"""Database of a node: SQLite, write-ahead of actions, event log, retention, pruning, disk space."""
