"""The agent's end of the launcher: process, connection, heartbeat, protocol, environment of tasks."""
