"""Assignment of the tasks of a known program to nodes, at the least cost of execution and communication ([Stone77])."""
