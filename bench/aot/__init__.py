"""Ahead-of-time compiles for GPUs that are not attached: kernels and whole steps, their resources, and the budgets that they keep.

  python -m bench.aot                        every case for a100-40gb, a100-80gb and h200, checked against budgets.json
  python -m bench.aot --targets=h200 --cases=decode
"""
