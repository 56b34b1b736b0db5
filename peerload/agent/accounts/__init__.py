"""Users of the machine: accounts, their directories and environment, files written as a user."""
