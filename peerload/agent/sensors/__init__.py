"""Sensors: what this machine has and how busy it is (cores, memory, GPUs, and devices named in the config)."""
