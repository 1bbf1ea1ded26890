"""The worker on a real GPU. Skipped without one."""

import tests.kernels  # noqa: F401 (chooses Triton's interpreter where there is no GPU, before anything imports triton)
