"""What is owed after the end of a task: output files, notification hook, completion jobs."""
