"""The life of a task at its home: intake, eligibility (groups, dependencies), queue, retries, lost attempts, drain."""
