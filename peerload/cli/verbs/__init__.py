"""The verbs, one file for each, named as the user types it. That is why there are more than 25 files: `main` imports
`peerload.cli.verbs.VERB` when the verb is typed, and nothing else."""
