"""Deployments of forked processes in which a process is killed with SIGKILL in a known state."""
