"""From pages to dense keys and values: contract in api.py, oracle in reference.py, implementation beside them."""
