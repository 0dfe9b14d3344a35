"""Packing, the packed dataset, shards, and the feeds that hand a step its batch."""
