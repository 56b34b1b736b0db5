"""Completion of tasks, what is owed after their end: output files, notification hook, completion jobs."""
