"""Copying whole pages within pools and between them: contract in api.py, oracle in reference.py, implementation beside them."""
