"""Rotating queries and keys and writing keys and values into their pages in one op: contract in api.py, oracle in reference.py."""
