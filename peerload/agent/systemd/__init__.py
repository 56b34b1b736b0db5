"""The agent as a systemd service: readiness, watchdog, health check, reload."""
