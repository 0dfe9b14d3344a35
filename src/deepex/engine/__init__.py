"""Arena, optimiser, step, training loop, evaluation, checkpoints. Never imports `nets`: recipes join them."""
