"""Sensors: resources of this machine and their utilization (cores, memory, GPUs, and devices named in the config)."""
