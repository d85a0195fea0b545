"""Qwen v1's tensors. Only names and slices.

`c_attn` is one matrix [3 * N * H, D], all queries, then all keys, then all values; it becomes qkv [D, 3, N, H] in that order. In the
gated block silu is on w2's output, so w2 is our gate and w1 our up.
"""

from convert.families.llama import ALL
from convert.mapping import Entry, Part
from jaxinfer.models.config import ModelConfig


def entries(config: ModelConfig) -> list[Entry]:
    """The table of a Qwen model: `transformer.h.<i>`, `transformer.wte`, `transformer.ln_f` and an untied head."""
    table = [Entry("embedding.weight", (Part("transformer.wte.weight", "same"),))]
    for layer in range(config.num_layers):
        source, target = f"transformer.h.{layer}", f"layers.{layer}"
        gate_up = tuple(Part(f"{source}.mlp.{name}.weight", "transposed", (ALL, slot)) for slot, name in enumerate(("w2", "w1")))
        table += [
            Entry(f"{target}.attention_norm.weight", (Part(f"{source}.ln_1.weight", "same"),)),
            Entry(f"{target}.attention.qkv.weight", (Part(f"{source}.attn.c_attn.weight", "transposed"),)),
            Entry(f"{target}.attention.qkv.bias", (Part(f"{source}.attn.c_attn.bias", "flat"),)),
            Entry(f"{target}.attention.output.weight", (Part(f"{source}.attn.c_proj.weight", "transposed"),)),
            Entry(f"{target}.mlp_norm.weight", (Part(f"{source}.ln_2.weight", "same"),)),
            Entry(f"{target}.mlp.gate_up.weight", gate_up),
            Entry(f"{target}.mlp.down.weight", (Part(f"{source}.mlp.c_proj.weight", "transposed"),)),
        ]
    table.append(Entry("final_norm.weight", (Part("transformer.ln_f.weight", "same"),)))
    table.append(Entry("lm_head.weight", (Part("lm_head.weight", "same"),)))
    return table
