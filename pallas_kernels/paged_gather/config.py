"""Static facts of a gather of paged keys and values. Computes on no array."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherSpec:
    """What is known of a call when it is traced."""

    num_rows: int
    """B, sequences."""
    max_len: int
    """Tokens of each row in the result."""
    num_kv_heads: int
    """K, KV heads."""
    head_dim: int
    """H."""
    page_size: int
    """Z, tokens a page."""
    pages_per_seq: int
    """M, page-table entries a sequence."""
    dtype: str
    """Dtype of the pages and of the result."""
