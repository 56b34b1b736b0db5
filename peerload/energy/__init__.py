"""Energy arithmetic, without clock, chance or I/O: where work costs least, when it does, and whose joules they were."""
