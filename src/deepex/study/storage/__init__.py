"""Copies of a dataset in each directory and format, and a page cache that is dropped before they are read."""
