"""The verbs of `peerload`: a file for each verb, or for a family of verbs that share code (`_FILES` in cli/common/verb_table.py).

More than 25 files, because `load` finds a verb by the name of its file, and only the verb in question is imported.
"""
