"""Says what a checkpoint is and what is unusual about it, before anything is converted: headers and configs only, no weight is read.

  python -m convert.inspect --model=FOLDER|FILE.gguf|CONVERTED|ORG/NAME
"""

import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from convert.formats import read_scheme
from convert.hf_reader import INDEX, PICKLE, PICKLE_INDEX, tokenizer_end_ids
from convert.source import Source, read_json
from jaxinfer import cli
from jaxinfer.checkpoint import MANIFEST, read_manifest
from jaxinfer.errors import CheckpointError, JaxInferError
from jaxinfer.quant import QUANT_METHOD, read_quant_config

CODES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
CONFIG_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"), "D": ("hidden_size", "n_embd"), "heads": ("num_attention_heads", "n_head"),
    "KV heads": ("num_key_value_heads",), "head dim": ("head_dim", "kv_channels"), "F": ("intermediate_size", "ffn_hidden_size"),
    "V": ("vocab_size",),
}
HEADS = ("lm_head.weight", "lm_head.qweight", "lm_head.packed")
"""A vocabulary head: plain, GPTQ's and our own quantised one."""
EMBEDDINGS = {"model.embed_tokens.weight": 0, "transformer.wte.weight": 0, "embedding.weight": 0, "embedding.scales": 1}
"""An embedding table, and along which axis its tokens lie."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a checkpoint, whatever it is stored as."""

    path: Path
    kind: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Name -> (shape, dtype as the files name it)."""
    num_bytes: int
    end_token_ids: Mapping[str, list[int]]
    """Where an end token is declared -> the ids."""
    tokenizer: str
    """Its files, or what it is built from."""
    num_tokens: int | None
    """Ids that the tokenizer has; None where no file says."""
    has_chat_template: bool
    notes: tuple[str, ...]
    """What the format itself has to say."""


def inspect(path: str | Path) -> str:
    """The report on a checkpoint, for a person.

    Args:
      path: a Hugging Face folder, a .gguf file or a converted checkpoint.

    Raises:
      CheckpointError: it is none of these, or damaged.
      UnsupportedModelError: a file format that is not read.
    """
    from convert.converter import is_converted, open_source

    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a Hugging Face folder, a .gguf file or a converted checkpoint")
    facts = _read_converted(path) if path.is_dir() and is_converted(path) else _read_source(open_source(path))
    unusual = find_unusual(facts)
    lines = [*_describe(facts), "unusual:" if unusual else "unusual: nothing", *(f"  - {line}" for line in unusual)]
    return "\n".join(lines)


def _read_source(source: Source) -> Facts:
    """A Hugging Face folder or a GGUF file."""
    tensors = {name: (info.shape, info.dtype) for name, info in source.tensors.items()}
    num_bytes = sum(info.num_bytes for info in source.tensors.values())
    if source.kind == "gguf":
        from convert.gguf_reader import GGUFSource

        assert isinstance(source, GGUFSource)
        metadata = source.metadata
        tokens = metadata.get("tokenizer.ggml.tokens")
        ends = {key: [metadata[f"tokenizer.ggml.{key}"]] for key in ("eos_token_id", "eot_token_id", "eom_token_id")
                if f"tokenizer.ggml.{key}" in metadata}
        return Facts(
            path=source.path, kind="GGUF file", config=source.config, generation_config=None, tensors=tensors, num_bytes=num_bytes,
            end_token_ids=ends, num_tokens=len(tokens) if isinstance(tokens, list) else None,
            tokenizer=f"in the file: model {metadata.get('tokenizer.ggml.model')!r}, pre-tokenizer {metadata.get('tokenizer.ggml.pre')!r}",
            has_chat_template=isinstance(metadata.get("tokenizer.chat_template"), str), notes=())
    weights = [name for name in ("model.safetensors", INDEX, PICKLE, PICKLE_INDEX) if (source.path / name).is_file()]
    format_name = "safetensors" if ".safetensors" in weights[0] else "torch .bin (pickle)"
    num_files = sum(path.suffix in (".safetensors", ".bin") for path in source.files)
    notes = [f"weights both as {weights[0]} and as {name}: the first is read" for name in weights[1:] if not name.startswith(weights[0])]
    return Facts(path=source.path, kind=f"Hugging Face folder, {num_files} {format_name} file{'s' * (num_files > 1)}", config=source.config,
                 generation_config=source.generation_config, tensors=tensors, num_bytes=num_bytes, notes=tuple(notes),
                 **_tokenizer_facts(source.path, source.config, source.generation_config))


def _read_converted(path: Path) -> Facts:
    """A checkpoint of ours."""
    manifest = read_manifest(path)
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else None
    tensors = {name: (tuple(spec["shape"]), spec["dtype"]) for name, spec in manifest["tensors"].items()}
    source = manifest["source"]
    notes = [f"converted from {source.get('kind')} {source.get('name')!r} by jaxinfer {manifest['jaxinfer_version']}",
             _verification(manifest["verification"])]
    facts = _tokenizer_facts(path, config, generation)
    return Facts(path=path, kind="converted checkpoint", config=config, generation_config=generation, tensors=tensors,
                 num_bytes=sum(entry["bytes"] for entry in manifest["params_files"].values()), notes=tuple(notes),
                 **{**facts, "end_token_ids": {**facts["end_token_ids"], MANIFEST: manifest["end_token_ids"]}})


def _verification(result: Mapping[str, Any] | None) -> str:
    """The manifest's record of --verify, in words."""
    if result is None:
        return "not verified: converting with --verify compares the logits with the source's"
    return (f"{'verified' if result.get('passed') else 'FAILED verification'} against the source over {result.get('tokens')} tokens: "
            f"largest difference of a logit {result.get('max_abs_diff')}, likeliest tokens "
            f"{'equal' if result.get('argmax_equal') else 'not all equal'}")


def _tokenizer_facts(folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> dict[str, Any]:
    """End tokens, tokenizer and chat template of a folder in Hugging Face's form."""
    ends = {}
    for name, values in (("config.json", config), ("generation_config.json", generation or {})):
        if (value := values.get("eos_token_id")) is not None:
            ends[name] = value if isinstance(value, list) else [value]
    if own := sorted(tokenizer_end_ids(folder)):
        ends["tokenizer_config.json"] = own
    kinds = {"tokenizer.json": "tokenizer.json", "qwen.tiktoken": "tiktoken", "tokenizer.model": "sentencepiece", "vocab.json": "BPE tables"}
    found = [label for name, label in kinds.items() if (folder / name).is_file()]
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    template = bool(settings.get("chat_template")) or any((folder / f"chat_template.{end}").is_file() for end in ("jinja", "json"))
    return {"end_token_ids": ends, "tokenizer": ", ".join(found) or "none", "has_chat_template": template, "num_tokens": _num_tokens(folder)}


def _num_tokens(folder: Path) -> int | None:
    """Ids of tokenizer.json, added tokens included."""
    if not (folder / "tokenizer.json").is_file():
        return None
    table = read_json(folder / "tokenizer.json")
    model, added = table.get("model"), table.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = [value for value in (vocab.values() if isinstance(vocab, dict) else ()) if type(value) is int]
    ids += [entry["id"] for entry in (added if isinstance(added, list) else ()) if isinstance(entry, dict) and type(entry.get("id")) is int]
    return max(ids) + 1 if ids else None


def _describe(facts: Facts) -> list[str]:
    """The fixed part of the report."""
    config = facts.config
    counts, sizes = Counter[str](), Counter[str]()
    for shape, dtype in facts.tensors.values():
        counts[dtype] += 1
        sizes[dtype] += math.prod(shape)
    stored = {name: next((config[key] for key in keys if config.get(key) is not None), None) for name, keys in CONFIG_KEYS.items()}
    sizes_text = ", ".join(f"{name} {value}" for name, value in stored.items() if value is not None)
    ends = "; ".join(f"{where} {ids}" for where, ids in facts.end_token_ids.items())
    words = "" if config.get("quantization_config") is None else " numbers, a word of packed integers being one,"
    rows = {
        "path": facts.path, "kind": facts.kind, "architecture": ", ".join(map(str, _architectures(config))) or "none", "shape": sizes_text,
        "parameters": f"{sum(sizes.values()):,}{words} in {len(facts.tensors)} tensors, {facts.num_bytes / 1e6:,.1f} MB",
        "tensors": ", ".join(f"{dtype} {counts[dtype]} ({sizes[dtype] / max(1, sum(sizes.values())):.1%})" for dtype, _ in sizes.most_common()),
        "quantisation": _quantisation(facts), "tied": _tied(facts), "end tokens": ends or "none declared", "rope": _rope(config),
        "context": config.get("max_position_embeddings", config.get("n_positions", "not stated")),
        "tokenizer": facts.tokenizer + ("" if facts.num_tokens is None else f", {facts.num_tokens} ids"),
        "chat template": "yes" if facts.has_chat_template else "no",
    }
    return [f"{name:14} {value}" for name, value in rows.items()] + [f"{'note':14} {note}" for note in facts.notes]


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    value = config.get("architectures")
    return value if isinstance(value, list) else []


def _quantisation(facts: Facts) -> str:
    declared = facts.config.get("quantization_config")
    if declared is not None:
        return _declared_quantisation(facts.config)
    types = sorted({dtype for shape, dtype in facts.tensors.values() if len(shape) > 1 and dtype not in (*CODES, *CODES.values())})
    return "GGML " + ", ".join(types) if types else "none"


def _declared_quantisation(config: Mapping[str, Any]) -> str:
    """What a quantization_config says, in words; only its method where the rest is not read."""
    declared = config["quantization_config"]
    method = declared.get("quant_method") if isinstance(declared, dict) else declared
    try:
        if method == QUANT_METHOD:
            own = read_quant_config(declared)
            apart = f"; {len(own.exceptions)} modules otherwise" if own.exceptions else ""
            return f"{own.method}, {own.weights}{apart}"
        scheme = read_scheme(config)
    except JaxInferError:
        return str(method)
    assert scheme is not None
    skipped = f"; not quantised: {', '.join(pattern.pattern for pattern in scheme.skipped)}" if scheme.skipped else ""
    return f"{scheme}{skipped}"


def _tied(facts: Facts) -> str:
    head = any(name in facts.tensors for name in HEADS)
    declared = facts.config.get("tie_word_embeddings")
    said = "says so" if declared is not None else "does not say"
    return f"{'yes' if declared else 'no'} (config {said}), head {'stored' if head else 'absent'}"


def _rope(config: Mapping[str, Any]) -> str:
    settings = {**_dict(config.get("rope_scaling")), **_dict(config.get("rope_parameters"))}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    theta = settings.pop("rope_theta", config.get("rope_theta", config.get("rotary_emb_base")))
    if config.get("use_dynamic_ntk"):
        kind = "Qwen's dynamic NTK"
    more = "".join(f", {name} {value}" for name, value in sorted(settings.items()))
    return f"{kind}, theta {'not stated' if theta is None else theta}{more}"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def find_unusual(facts: Facts) -> list[str]:
    """What a user may want to know before a conversion, in sentences."""
    config, found = facts.config, []
    refusal = _refusal(config)
    if refusal:
        found.append(f"cannot be converted or run: {refusal}")
    dtypes = Counter[str]()
    for shape, dtype in facts.tensors.values():
        dtypes[CODES.get(dtype, dtype)] += math.prod(shape)
    stated, main = config.get("torch_dtype", config.get("dtype")), dtypes.most_common(1)[0][0] if dtypes else None
    if isinstance(stated, str) and main in CODES.values() and stated != main:
        found.append(f"the config says {stated}, most weights are {main}")
    plain = [dtype for dtype in dtypes if dtype in CODES.values()]
    if len(plain) > 1 and len(plain) == len(dtypes):
        found.append(f"weights of several dtypes ({', '.join(sorted(plain))}): conversion makes them {main}")
    if facts.kind != "GGUF file" and facts.generation_config is None:
        found.append("no generation_config.json: end tokens and sampling defaults come from config and tokenizer alone")
    if not facts.end_token_ids:
        found.append("no end token is declared: generation stops only at max_tokens or a stop string")
    sets = {tuple(sorted(map(str, ids))) for ids in facts.end_token_ids.values()}
    if len(sets) > 1:
        found.append("the declarations of end tokens differ: generation stops at any of them")
    rows = next((facts.tensors[name][0][axis] for name, axis in EMBEDDINGS.items() if name in facts.tensors), None)
    if rows is not None and facts.num_tokens is not None and rows != facts.num_tokens:
        what = "padding that is never sampled" if rows > facts.num_tokens else "too few: some tokens cannot be embedded"
        found.append(f"the embedding has {rows} rows for {facts.num_tokens} tokens: {what}")
    if facts.tokenizer == "none":
        found.append("no tokenizer files: only token ids can be given")
    if config.get("tie_word_embeddings") and HEADS[0] in facts.tensors:
        found.append("tied embeddings, yet a head is stored: it must equal the embedding, and is dropped")
    elif config.get("tie_word_embeddings") and any(name in facts.tensors for name in HEADS):
        found.append("tied embeddings, yet a quantised head is stored: a conversion unties them and holds both")
    if config.get("auto_map"):
        found.append("the config names code of its own (auto_map): it is never run")
    return found


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Why the config is refused, None when it is not."""
    from jaxinfer.models.registry import read_model_config

    declared = _dict(config.get("quantization_config"))
    try:
        if declared.get("quant_method") != QUANT_METHOD:
            read_scheme(config)
            config = {name: value for name, value in config.items() if name != "quantization_config"}
        read_model_config(config)
    except JaxInferError as error:
        return str(error)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_string("model", None, "A Hugging Face folder, a .gguf file, a converted checkpoint, or an id of the Hugging Face hub.",
                        flag_values=values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> None:
    from convert import hub

    model = values["model"].value
    if not model:
        raise app.UsageError("--model is needed")
    os.environ["JAX_PLATFORMS"] = "cpu"  # reading headers needs no GPU
    path = cli.expanded("model", model)
    print(inspect(hub.download(model) if not path.exists() and hub.is_model_id(model) else path))


if __name__ == "__main__":
    sys.exit(main())
