"""RMSNorm with an optional residual add: contract in api.py, oracle in reference.py, kernels beside them."""
