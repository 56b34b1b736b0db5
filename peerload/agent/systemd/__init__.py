"""The agent as a service: readiness, watchdog, health, paths."""
