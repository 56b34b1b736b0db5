"""Completion of tasks: output files, the notification hook, retention of ended tasks."""
