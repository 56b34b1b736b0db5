"""The control socket: connections, principals, authorization, quotas, ids of tasks."""
