"""Text output that the command line and `top` share: tables, sizes and times, rows of tasks."""
