"""Fused Triton kernels of the worker on NVIDIA GPUs: tensors in, tensors out. They know no plan, no model and no rank.

Nothing here reads a tensor on the host or depends on a value in one, so every call can be captured in a CUDA graph;
batches are padded to fixed shapes. With TRITON_INTERPRET=1 set before the first import they run on a CPU.
"""
