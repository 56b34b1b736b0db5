"""Files of tasks: fetched, served, put in place before a task starts, and brought home after it ends."""
