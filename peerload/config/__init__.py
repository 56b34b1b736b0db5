"""Settings of an agent: read from flags, environment and TOML files, and checked."""
