"""Ahead-of-time compiles for GPUs that are not attached: kernels and whole steps, their resources, and the budgets that they keep.

  python -m bench.aot                        every case for a100-40gb, a100-80gb and h200, checked against budgets.json
  python -m bench.aot --targets=h200 --cases=decode

budgets.json limits every case: copies and transposes of a MiB and more, command buffers, launches in and outside them, loops on the host and
temporary bytes. A limit is the most that was measured on any target. Beyond it, whole steps may take up to a tenth more launches and a
quarter more temporaries, and int4 products of narrow matrices the sums of 12 blocks that share k (8 from 32 tokens on) and the launch that
adds them up.
"""
