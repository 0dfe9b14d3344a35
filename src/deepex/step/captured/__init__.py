"""A whole step as one CUDA graph: the graph, bf16 weights, the batch table, fusion, kernels."""
