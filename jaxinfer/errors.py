"""Typed errors for whatever a user or a file can cause. Holds no logic and imports nothing.

Every message names the value, the limit and the remedy. `assert` is kept for our own invariants.
"""


class JaxInferError(Exception):
    """Base of every error that a user, a file or a device can cause."""


class ConfigError(JaxInferError, ValueError):
    """An engine setting, or a pair of settings, that cannot work."""


class RequestError(JaxInferError, ValueError):
    """A request that can never be served (empty prompt, prompt too long, a sampling value out of range)."""


class CheckpointError(JaxInferError):
    """A checkpoint that is absent, incomplete, corrupt or not what its manifest says."""


class UnsupportedModelError(CheckpointError):
    """An architecture, a config attribute or a tensor type that is read but not implemented."""


class TokenizerError(CheckpointError):
    """Tokenizer files or a chat template that are absent or cannot be used."""


class CapacityError(JaxInferError):
    """The model, or its KV cache, does not fit the memory that it was given."""


class EngineError(JaxInferError, RuntimeError):
    """An engine that cannot be used: a step of it failed earlier, or another thread is inside it."""


class DumpError(JaxInferError):
    """A dumped step that cannot be read, or that another model ran."""


class PrefixCacheError(JaxInferError):
    """A saved prefix cache that cannot be written or read, is damaged, or is of another model, KV dtype or page size."""


class NonFiniteError(JaxInferError):
    """The model produced NaN or infinite logits."""
