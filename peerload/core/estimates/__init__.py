"""Estimates from history: durations of tasks, and their GPU memory."""
