"""The scheduler service: frontend processes and the core process. Never imports torch."""
