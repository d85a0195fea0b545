"""Checkpoint conversion: a Hugging Face folder or a GGUF file in, an Orbax folder with a manifest out. No torch, no network.

`convert.converter.convert` is the library call, `python -m convert` the command. Importing this package imports neither jax nor orbax.
"""
