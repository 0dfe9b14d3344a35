"""Triton kernels for what PyTorch leaves apart on a GPU. Without a GPU, as in most tests, Triton interprets them."""
