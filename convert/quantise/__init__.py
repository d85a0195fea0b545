"""Makes 4-bit and 8-bit checkpoints: calibration, Gram matrices, scale and clipping search (awq), error feedback (gptq), rounding (rtn)."""
