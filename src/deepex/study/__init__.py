"""The experiments: what to vary, how often, in which order; they run as `deepex train` would, and leave a study directory."""
