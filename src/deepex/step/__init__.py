"""One step of one replica: run operator by operator, compiled, or captured; and what it costs."""
