"""Static facts of a copy of pages. Computes on no array."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySpec:
    """What is known of a call when it is traced."""

    num_pools: int
    """Arrays of pages, usually two a layer."""
    num_pages: int
    """P, pages of every pool."""
    num_copies: int
    """U, pages that are copied, padding included."""
    page_bytes: int
    """Bytes of one page in all pools together."""
