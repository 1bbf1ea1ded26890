"""The model families, one readable file each. No loading code."""
