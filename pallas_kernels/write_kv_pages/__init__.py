"""Writing new keys and values into their pages: contract in api.py, oracle in reference.py, kernels beside them."""
