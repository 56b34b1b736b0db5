"""What this machine has and how busy that is: cores and memory, GPUs, whatever else is named in the config."""
