"""Matmul with weights of 4 or 8 bits, scaled by group: contract in api.py, packed form in layout.py, oracle in reference.py, kernels beside."""
