"""From the files of a dataset to the batches of a rank: order, reading, caches, placements.

To read: `order` (who sees what, when), `samples` (a rank's), `read` (files, in large requests), `exchange` (ranks of a node read
for each other), the stores `cache` and `window`, the feeds `feed` and `device`, and `placement`, which chooses among them.
"""
