"""A run from its configuration to its last checkpoint. Never imports `nets`: recipes join them."""
