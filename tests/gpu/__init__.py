"""The worker on a real GPU. Skipped without one."""
