"""The agent's side of the launcher: its process, the connection, the heartbeat, and the environment of tasks."""
