"""One contiguous buffer that holds a replica, what a network is made of, and the update of its weights."""
