"""Attention of dense batches of queries over dense keys and values: contract in api.py, oracle in reference.py, kernels beside them."""
