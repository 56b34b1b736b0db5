"""Energy arithmetic, without clock, chance or I/O: the cheapest node and time for work, and the accounting of joules."""
