"""Reasons for people: why a task waits, why it went where it went, and which change would start it."""
