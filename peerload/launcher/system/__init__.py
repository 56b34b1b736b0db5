"""The launcher as a service for all users of a machine: it runs as root, and starts each task as the user who submitted it.

Fork server, account resolver, dropping of privileges, sandbox, seccomp filter, cgroup limits, and files written as a user.
"""
