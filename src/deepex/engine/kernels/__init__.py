"""Triton kernels for what PyTorch leaves apart on a GPU. Each takes and gives plain tensors; without a GPU, Triton interprets them."""
