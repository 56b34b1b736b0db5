"""Files that travel with a task: their manifest, their blocks, how they are read and how they are placed."""
