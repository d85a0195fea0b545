"""Llama's tensors. The pieces serve every family that names its tensors alike. Only names and slices: no data is touched here.

Linear weights are [out, in] in the source and [in, *out] here. Query, key and value share one parameter, grouped by KV head:
[D, K, G + 2, H] holds, for each of the K heads, its G query heads, then its key, then its value.
"""

from convert.mapping import Entry, Index, Part
from jaxinfer.models.config import ModelConfig

ALL = slice(None)


def entries(config: ModelConfig) -> list[Entry]:
    """The table of a Llama model: `model.layers.<i>.self_attn`, `.mlp`, two norms a layer, embedding, final norm and head."""
    table = [Entry("embedding.weight", (Part("model.embed_tokens.weight", "same"),))]
    for layer in range(config.num_layers):
        source, target = f"model.layers.{layer}", f"layers.{layer}"
        table.append(Entry(f"{target}.attention_norm.weight", (Part(f"{source}.input_layernorm.weight", "same"),)))
        table += attention_entries(f"{source}.self_attn", f"{target}.attention", config)
        table.append(Entry(f"{target}.mlp_norm.weight", (Part(f"{source}.post_attention_layernorm.weight", "same"),)))
        table += mlp_entries(f"{source}.mlp", f"{target}.mlp")
    table.append(Entry("final_norm.weight", (Part("model.norm.weight", "same"),)))
    if not config.tie_embeddings:
        table.append(Entry("lm_head.weight", (Part("lm_head.weight", "same"),)))
    return table


def attention_entries(source: str, target: str, config: ModelConfig) -> list[Entry]:
    """qkv [D, K, G + 2, H] from q_proj [N * H, D], k_proj and v_proj [K * H, D]; output [N * H, D] from o_proj; biases likewise."""
    num_groups = config.num_heads // config.num_kv_heads
    slots: dict[str, Index] = {"q_proj": (ALL, slice(0, num_groups)), "k_proj": (ALL, num_groups), "v_proj": (ALL, num_groups + 1)}
    weights = tuple(Part(f"{source}.{name}.weight", "transposed", (ALL, *slot)) for name, slot in slots.items())
    table = [Entry(f"{target}.qkv.weight", weights)]
    if config.qkv_bias:
        table.append(Entry(f"{target}.qkv.bias", tuple(Part(f"{source}.{name}.bias", "flat", slot) for name, slot in slots.items())))
    table.append(Entry(f"{target}.output.weight", (Part(f"{source}.o_proj.weight", "transposed"),)))
    if config.output_bias:
        table.append(Entry(f"{target}.output.bias", (Part(f"{source}.o_proj.bias", "same"),)))
    return table


def mlp_entries(source: str, target: str) -> list[Entry]:
    """gate_up [D, 2, F] from gate_proj and up_proj [F, D]; down [F, D] from down_proj [D, F]."""
    gate_up = tuple(Part(f"{source}.{name}.weight", "transposed", (ALL, slot)) for slot, name in enumerate(("gate_proj", "up_proj")))
    return [Entry(f"{target}.gate_up.weight", gate_up), Entry(f"{target}.down.weight", (Part(f"{source}.down_proj.weight", "transposed"),))]
