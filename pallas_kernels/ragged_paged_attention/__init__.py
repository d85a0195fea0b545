"""Attention of ragged query rows over paged keys and values: contract in api.py, oracle in reference.py, kernels beside them."""
