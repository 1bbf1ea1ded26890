"""The worker: executes step plans on one tensor-parallel group of ranks. Knows nothing of requests or scheduling."""
