"""The launcher: the process that starts the processes of tasks, and outlives the agent.

It imports nothing of peerload outside this package, since it has to stay small for months. It spawns, contains (cgroups, or the
process table), limits memory, freezes tasks whose lease has run out, and keeps exit records until the agent has them.
"""
