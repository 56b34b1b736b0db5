"""The verbs: a file for each, or for some that belong together (`cli/common/verb_table.py` tells which). That is why there are more
than 25 files: `main` imports the one that has the verb which is typed, and nothing else."""
