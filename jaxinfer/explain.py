"""What an engine would run with, and why: resolved settings, kernel table, buckets, memory plan. Loads no weights, compiles nothing.

  python -m jaxinfer.explain --model=DIR [--gpu=a100-40gb|a100-80gb|h100|h200]
  python -m jaxinfer.explain --shape=Q --quantization=int4 [--lm_head=int4 --embedding=int8] --gpu=a100-80gb --max_model_len=8192

A .gguf file or a Hugging Face folder is converted first, into the folder that generate would use; later runs find it there.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from jaxinfer import cli
from jaxinfer.checkpoint import read_manifest
from jaxinfer.config import EngineConfig
from jaxinfer.engine.hardware import GPUS, Hardware, attached, named_gpu
from jaxinfer.engine.layer_kernels import attention_choice, norm_choice, rotary_choice
from jaxinfer.engine.matmuls import matmul_choices, score_choices
from jaxinfer.engine.resolve import ResolvedConfig, resolve, running_dtype
from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import abstract_params, read_model_config
from jaxinfer.models.shapes import SHAPES, quantized
from jaxinfer.quant import EMBEDDING, FORMATS, HEAD, QuantConfig
from jaxinfer.source import converted_checkpoint

_CHOSEN = {"token_buckets": "Buckets", "batch_buckets": "Buckets", "attention_implementation": "Kernels", "rotary_implementation": "Kernels",
           "norm_implementation": "Kernels", "matmul_implementation": "Kernels"}
"""Settings that are left to the engine -> the block that shows what it chose."""


def plan(config: EngineConfig, hardware: Hardware, *, shape: str | None = None, quantization: str | None = None,
         lm_head: str | None = None, embedding: str | None = None) -> ResolvedConfig:
    """The resolved configuration of a checkpoint, or of a named shape in bfloat16 or quantised, on attached or absent hardware.

    Raises:
      ConfigError: an unknown shape, a quantisation of what is no shape, a quantised head or embedding without quantised projections, or
        settings that contradict the model.
      CheckpointError, CapacityError: as for LLM.
    """
    for name, value in (("quantization", quantization), ("lm_head", lm_head), ("embedding", embedding)):
        if value is not None and shape is None:
            raise ConfigError(f"{name} = {value!r}: only a shape can be planned quantised; a checkpoint says itself what it is.")
        if value is not None and quantization is None:
            raise ConfigError(f"{name} = {value!r}: only a shape whose projections are quantised is planned so; give a quantization too.")
    if shape is not None:
        if shape not in SHAPES:
            raise ConfigError(f"shape = {shape!r}: must be one of {', '.join(SHAPES)}.")
        model = SHAPES[shape] if quantization is None else quantized(SHAPES[shape], quantization, lm_head=lm_head,
                                                                               embedding=embedding)
        dtype, valid = "bfloat16", model.vocab_size
    else:
        path = converted_checkpoint(config.model, dtype=config.dtype)
        model, dtype, valid = _read(path)
    dtype = running_dtype(config.dtype, dtype)
    part = model.part(config.tensor_parallel_size)
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in abstract_params(part, dtype).values())
    return resolve(config, model, hardware, checkpoint_dtype=dtype, num_valid_tokens=valid, weight_bytes=weights)


def _read(path: Path) -> tuple[ModelConfig, str, int]:
    """(model, stored dtype, ids that the tokenizer knows) of a converted checkpoint."""
    from jaxinfer.tokenizer import Tokenizer, has_tokenizer

    model = read_model_config(json.loads((path / "config.json").read_text()))
    num_tokens = Tokenizer.from_dir(path).num_tokens if has_tokenizer(path) else model.vocab_size
    return model, read_manifest(path)["dtype"], min(model.vocab_size, num_tokens)


def explain(resolved: ResolvedConfig) -> str:
    """The report, for a person."""
    blocks = [_settings(resolved), _kernels(resolved), _buckets(resolved), _memory(resolved), _roofline(resolved)]
    return "\n\n".join(blocks)


def _settings(r: ResolvedConfig) -> str:
    m, num = r.model, r.engine.tensor_parallel_size
    each = " each" if num > 1 else ""
    derived = {
        "model": f"{m.architecture}: {m.num_layers} layers, D {m.dim}, {m.num_heads}/{m.num_kv_heads} heads of {m.head_dim}, F {m.mlp_dim}, "
                 f"V {m.vocab_size} ({r.num_valid_tokens} can be sampled)",
        "quantization": "none" if m.quantization is None else f"{m.quantization.method}: {m.quantization.weights}{_named(m.quantization)}",
        "hardware": f"{f'{num} x ' if num > 1 else ''}{r.hardware.name}, {r.hardware.memory_bytes / 1e9:.1f} GB{each} to plan with",
        "dtype": str(r.dtype), "kv_dtype": str(r.kv_dtype), "max_model_len": r.max_model_len, "max_num_seqs": r.max_num_seqs,
        "max_num_batched_tokens": r.max_num_batched_tokens, "num_scheduler_steps": r.num_scheduler_steps, "page_size": r.page_size,
        "num_pages": r.num_pages,
    }
    kept = {f.name: getattr(r.engine, f.name) for f in dataclasses.fields(r.engine) if f.name not in derived}
    kept |= {name: f"see {block}" for name, block in _CHOSEN.items() if kept[name] in (None, "auto")}
    return "Settings\n" + "\n".join(f"  {name:26} {value}" for name, value in {**derived, **kept}.items())


def _named(quantization: QuantConfig) -> str:
    """Vocabulary head and embedding, where they are quantised."""
    return "".join(f"; {module}: {found}" for module in (HEAD, EMBEDDING) if (found := quantization.format_of(module)) is not None)


def _kernels(r: ResolvedConfig) -> str:
    lines: dict[str, list[str]] = {}
    for layout in r.layouts:
        kind = "decode" if layout.decode_only else "prefill and mixed"
        lines.setdefault(f"{kind}: {attention_choice(r, layout)}", []).append(layout.name)
    for choice in (rotary_choice, norm_choice):
        for layout in r.layouts:
            lines.setdefault(str(choice(r, layout)), []).append(layout.name)
    for layout in r.layouts:
        for line in matmul_choices(r, layout):
            lines.setdefault(line, []).append(layout.name)
    for line in score_choices(r):
        lines.setdefault(line, []).append("prompt scores")
    return "Kernels\n" + "\n".join(f"  {line}\n      buckets {', '.join(names)}" for line, names in lines.items())


def _buckets(r: ResolvedConfig) -> str:
    decode = [str(x.num_rows) for x in r.layouts if x.decode_only]
    mixed = [x.name for x in r.layouts if not x.decode_only]
    bursts = f"\n  {f'bursts of {r.num_scheduler_steps} (rows)':26}{', '.join(str(x.num_rows) for x in r.burst_layouts)}"
    return (f"Buckets: {len(r.layouts) + len(r.burst_layouts)} executables, compiled at start; nothing compiles later\n"
            f"  decode (rows)             {', '.join(decode) or 'none: deterministic mode runs every step at one bucket'}\n"
            f"  mixed (tokens x rows)     {', '.join(mixed)}{bursts if r.burst_layouts else ''}")


def _memory(r: ResolvedConfig) -> str:
    m = r.memory
    tokens = (r.num_pages - 1) * r.page_size
    rows = [("weights", m.weight_bytes, ""), ("KV pool", m.kv_bytes, f"{r.num_pages} pages of {m.page_bytes / 1e6:.2f} MB, {tokens} tokens: "
            f"{tokens // r.max_model_len} sequences of max_model_len, {r.max_num_seqs} of up to {tokens // r.max_num_seqs}"),
            ("largest step (estimate)", m.step_bytes, ""), ("total", m.total_bytes, ""),
            ("budget", m.budget_bytes, f"gpu_memory_utilization {r.engine.gpu_memory_utilization}")]
    num = r.engine.tensor_parallel_size
    each = ", each device" if num > 1 else ""
    if r.num_host_pages:
        rows.append(("host memory for swaps", r.num_host_pages * m.page_bytes * num,
                     f"{r.num_host_pages} pages{' of all devices' * (num > 1)}, {r.num_host_pages * r.page_size} tokens of preempted requests"))
    return f"Memory{each}\n" + "\n".join(f"  {name:26} {size / 1e9:9.3f} GB  {note}".rstrip() for name, size, note in rows)


def _roofline(r: ResolvedConfig) -> str:
    if r.hardware.read_bytes_per_s is None:
        return f"Roofline\n  memory bandwidth is {r.hardware.bandwidth_source}"
    embedding = sum(math.prod(x.shape) * x.dtype.itemsize for name, x in abstract_params(r.part, str(r.dtype)).items()
                    if name.startswith(f"{EMBEDDING}."))
    read, kv = r.memory.weight_bytes - (0 if r.part.tie_embeddings else embedding), r.memory.page_bytes // r.page_size
    lines = []
    for batch in (1, 8, 32, 128):
        if batch <= r.max_num_seqs:
            seconds = (read + batch * 640 * kv) / r.hardware.read_bytes_per_s
            lines.append(f"  batch {batch:4}: {seconds * 1e3:8.2f} ms a step, {batch / seconds:9.0f} tokens/s")
    shared = ", without what devices exchange" if r.engine.tensor_parallel_size > 1 else ""
    return (f"Decode at the memory bandwidth ({r.hardware.read_bytes_per_s / 1e12:.2f} TB/s, {r.hardware.bandwidth_source}), context 640"
            f"{shared}; no engine is faster by much\n" + "\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_string("shape", None, f"A named shape with no checkpoint: {', '.join(SHAPES)}.", flag_values=values, module_name="What")
    flags.DEFINE_enum("gpu", None, list(GPUS), "Plan for this GPU instead of the attached device.", flag_values=values, module_name="What")
    flags.DEFINE_enum("quantization", None, list(FORMATS), "Plan the named shape with its projections quantised so.", flag_values=values,
                      module_name="What")
    flags.DEFINE_enum("lm_head", None, list(FORMATS), "Plan the named shape with a vocabulary head of its own, quantised so.",
                      flag_values=values, module_name="What")
    flags.DEFINE_enum("embedding", None, list(FORMATS), "Plan the named shape with its embedding quantised so, and a head that is tied to it.",
                      flag_values=values, module_name="What")
    cli.define_engine_flags(values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> None:
    config, shape, gpu = cli.engine_config(values), values["shape"].value, values["gpu"].value
    if bool(config.model) == (shape is not None):
        raise app.UsageError("give exactly one of --model and --shape.")
    print(explain(plan(config, attached() if gpu is None else named_gpu(gpu), shape=shape, quantization=values["quantization"].value,
                       lm_head=values["lm_head"].value, embedding=values["embedding"].value)))


if __name__ == "__main__":
    sys.exit(main())
