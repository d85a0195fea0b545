"""What the command lines share: flags made from config fields, readable help, exit codes, logging. Never imports jax.

A command defines its flags in absl's FLAGS, or in FlagValues of its own so that it can be called more than once in a process.
Exit codes: 0 done, 1 the work failed (one line says why), 2 the command line is wrong, 130 interrupted.
"""

import ast
import dataclasses
import errno
import inspect
import logging
import os
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from absl import logging as absl_logging

from jaxinfer.config import VLLM_SPELLINGS, EngineConfig
from jaxinfer.errors import ConfigError, JaxInferError, RequestError
from jaxinfer.sampling.params import SamplingParams

LOG_LEVELS = ("debug", "info", "warning", "error")
ENGINE_NAMES = {"seed": "engine_seed", "dump_steps_dir": "dump_step"}
"""Engine fields whose flag has another name: --seed is the request's."""
STRUCTURED_FLAGS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Flag -> field of StructuredOutputsParams."""
_NO_FLAGS = ("structured_outputs", "logits_processors")
"""Fields of SamplingParams that have no flag of their name: the flags above give the first, and code alone registers processors."""


_ALIASES = "aliases"


class _ValueParser(flags.ArgumentParser[Any]):
    """Parses a flag's text as one of a few types; 'none' where None is allowed."""

    def __init__(self, read: Callable[[str], Any], kind: str, optional: bool) -> None:
        super().__init__()
        self._read, self._kind, self._optional = read, kind, optional

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument  # a default
        if self._optional and argument.lower() == "none":
            return None
        try:
            return self._read(argument)
        except ValueError:
            raise ValueError(f"must be {self.flag_type()}") from None

    def flag_type(self) -> str:
        return f"{self._kind} or none" if self._optional else self._kind


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text else ()


_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "an integer"), float: (float, "a number"), str: (str, "a text"),
    tuple[int, ...]: (_integers, "integers with commas between"), Sequence[int]: (_integers, "integers with commas between"),
}


def field_help(cls: type) -> dict[str, str]:
    """Field name -> the sentence that documents it: its metadata's 'help', or else the string under it in the class body."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    under = {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }
    return {f.name: f.metadata.get("help") or under.get(f.name, "") for f in dataclasses.fields(cls)}


def define_fields(flag_values: flags.FlagValues, cls: type, group: str, *, rename: Mapping[str, str] | None = None,
                  defaults: Mapping[str, Any] | None = None, aliases: Mapping[str, str] | None = None) -> None:
    """Defines one flag a field of a config dataclass.

    Args:
      flag_values: where.
      cls: a dataclass whose fields are bool, int, float, str, integer lists or repeatable texts, or None beside one of these.
      group: the heading of its flags in the help.
      rename: field -> flag name, where they differ.
      defaults: field -> the flag's default, where it differs.
      aliases: another spelling -> field.
    """
    hints, helps = typing.get_type_hints(cls), field_help(cls)
    rename, defaults = rename or {}, defaults or {}
    for field in _flag_fields(cls):
        name, default = rename.get(field.name, field.name), defaults.get(field.name, field.default)
        flags.DEFINE_flag(_flag(name, hints[field.name], default, helps[field.name]), flag_values, module_name=group)
    for alias, field_name in (aliases or {}).items():
        flags.DEFINE_alias(alias, rename.get(field_name, field_name), flag_values, module_name=_ALIASES)


def _flag_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields that have a flag each."""
    return [f for f in dataclasses.fields(cls) if cls is not SamplingParams or f.name not in _NO_FLAGS]


def _flag(name: str, hint: Any, default: Any, help: str) -> flags.Flag[Any]:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    optional = type(None) in kinds
    if bool in kinds:
        return flags.BooleanFlag(name, default, help)
    if Sequence[str] in kinds:
        return flags.MultiFlag(flags.ArgumentParser(), flags.ArgumentSerializer(), name, default, help)
    found = [kind for kind in kinds if kind in _READERS]
    assert len(found) == 1, f"--{name}: no way to read {hint} from a command line"
    return flags.Flag(_ValueParser(*_READERS[found[0]], optional), flags.ArgumentSerializer(), name, default, help)


def field_values(flag_values: flags.FlagValues, cls: type, *, rename: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Field -> value of its flag, for every field of the dataclass that has one."""
    return {f.name: flag_values[(rename or {}).get(f.name, f.name)].value for f in _flag_fields(cls)}


def define_engine_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines a flag for every EngineConfig field, vLLM's spellings included."""
    define_fields(flag_values, EngineConfig, "Engine", rename=ENGINE_NAMES, aliases=VLLM_SPELLINGS)


def engine_config(flag_values: flags.FlagValues = flags.FLAGS) -> EngineConfig:
    """The EngineConfig that the flags say.

    Raises:
      absl.app.UsageError: a value out of range, or two that contradict each other.
    """
    try:
        config = EngineConfig(**field_values(flag_values, EngineConfig, rename=ENGINE_NAMES))
    except ConfigError as e:
        raise app.UsageError(str(e)) from e
    for name in ("model", "compilation_cache_dir"):
        expanded(name, getattr(config, name) or "")
    return config


def expanded(name: str, text: str) -> Path:
    """The path that a flag gives, with ~ and ~user replaced.

    Raises:
      absl.app.UsageError: a home folder that is not known.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise app.UsageError(f"--{name}={text}: the home folder that {text.split('/')[0]} stands for is not known. Write the path in "
                             "full.") from e


def define_sampling_flags(flag_values: flags.FlagValues = flags.FLAGS, *, defaults: Mapping[str, Any] | None = None) -> None:
    """Defines a flag for every SamplingParams field; `defaults` are the command's own."""
    define_fields(flag_values, SamplingParams, "Sampling", defaults=defaults)
    for define, name, help in (
            (flags.DEFINE_string, "json_schema", "File with a JSON schema that the text must follow."),
            (flags.DEFINE_string, "regex", "A regular expression that the whole text must match."),
            (flags.DEFINE_list, "choice", "The texts that may be generated, with commas between; quoted as in CSV where one holds a comma."),
            (flags.DEFINE_string, "grammar", "File with a grammar in Lark's or in GBNF form that the text must follow.")):
        define(name, None, help, flag_values=flag_values, module_name="Sampling")


def sampling_params(flag_values: flags.FlagValues = flags.FLAGS) -> SamplingParams:
    """The SamplingParams that the flags say.

    Raises:
      absl.app.UsageError: a value out of range, or a file that cannot be read.
    """
    structured = {STRUCTURED_FLAGS[name]: flag_values[name].value for name in STRUCTURED_FLAGS if flag_values[name].value is not None}
    for name in ("json_schema", "grammar"):
        file = flag_values[name].value
        if file is not None:
            structured[STRUCTURED_FLAGS[name]] = _text_of(name, file)
    try:
        return SamplingParams(structured_outputs=structured or None, **field_values(flag_values, SamplingParams))
    except RequestError as e:
        raise app.UsageError(str(e)) from e


def _text_of(name: str, file: str) -> str:
    """The text in the file that a flag names."""
    try:
        return expanded(name, file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise app.UsageError(f"--{name}={file} cannot be read: {why}.") from e


def _define_common(flag_values: flags.FlagValues) -> None:
    if "help" not in flag_values:
        flags.DEFINE_boolean("help", False, "Show this help.", flag_values=flag_values, module_name="General")
        flags.DEFINE_enum("log_level", "info", LOG_LEVELS, "What is logged on standard error.", flag_values=flag_values,
                          module_name="General")


def parse(flag_values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Parses all arguments as flags.

    Raises:
      absl.flags.Error: an unknown flag or a value of the wrong form.
      absl.app.UsageError: an argument that is no flag.
    """
    rest = flag_values(["", *argv])[1:]
    if rest:
        raise app.UsageError(f"unexpected argument {rest[0]!r}: every setting is given as --name=value.")


def usage(flag_values: flags.FlagValues, description: str) -> str:
    """The help text: the description, then each group's flags with meaning, form and default."""
    lines = [description.strip(), ""]
    groups = flag_values.flags_by_module_dict()
    own = [group for group in groups if group in sys.modules or group == sys.argv[0]]  # flags that the command defined for itself
    for group in (*own, *(g for g in groups if g not in own)):
        members = groups[group]
        if group == _ALIASES or group.startswith("absl."):
            continue
        lines.append("Command:" if group in own else f"{group}:")
        for flag in members:
            name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
            form = [*_form(flag), *_default(flag)]
            text = flag.help.partition(";\n")[0].partition(">: ")[2] or flag.help.partition(";\n")[0]  # without what absl adds
            text += f" ({', '.join(form)})" if form else ""
            lines += [f"  {name}", *textwrap.wrap(text, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        lines.append("")
    return "\n".join(lines)


def _form(flag: flags.Flag[Any]) -> list[str]:
    if flag.boolean:
        return []
    if isinstance(flag, flags.MultiFlag):
        return ["may be repeated"]
    if isinstance(flag, flags.EnumFlag):
        return ["one of " + ", ".join(flag.parser.enum_values)]
    return [flag.parser.flag_type()]


def _default(flag: flags.Flag[Any]) -> list[str]:
    """The default as it would be written on the command line."""
    if flag.boolean:
        return [] if flag.default is None else [f"default {'on' if flag.default else 'off'}"]
    if flag.default in (None, "", [], ()):
        return []
    many = isinstance(flag.default, list | tuple)
    return [f"default {','.join(map(str, flag.default)) if many else flag.default}"]


def run(main: Callable[[list[str]], int | None], flag_values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] | None = None,
        description: str | None = None) -> int:
    """Runs a command: parses its flags, starts logging, calls main and turns what a user can cause into one line and an exit code.

    Args:
      main: the command; takes [program name], all else being flags, and returns its exit code or None for 0.
      flag_values: its flags; --help and --log_level are added.
      argv: arguments without the program's name; None takes the process's.
      description: opens the help; default: the docstring of main's module.

    Returns:
      The exit code.
    """
    _define_common(flag_values)
    try:
        try:
            parse(flag_values, sys.argv[1:] if argv is None else argv)
        except flags.IllegalFlagValueError:  # such as a needed flag that is missing, which whoever asks for help may not know yet
            if not flag_values["help"].value:
                raise
        if flag_values["help"].value:
            print(usage(flag_values, description or inspect.getdoc(sys.modules[main.__module__]) or ""), flush=True)
            return 0
        start_logging(str(flag_values["log_level"].value))
        code = main(sys.argv[:1]) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where what goes wrong is reported
        return code
    except (flags.Error, app.UsageError) as e:
        print(f"error: {e}\nUse --help to see all flags.", file=sys.stderr)
        return 2
    except JaxInferError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()  # its reader has left
        return 1
    except OSError as e:
        if e.filename is not None or e.errno not in _WRITE_ERRORS:
            raise
        _discard_output()
        print(f"error: standard output cannot be written: {e.strerror}.", file=sys.stderr)
        return 1


_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What writing to an open file meets. What opens files by name, or writes results into one, reports by itself."""


def _discard_output() -> None:
    """Points standard output elsewhere, or the interpreter complains when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start_logging(level: str) -> None:
    """Logs our own rooms at the level, and what we build on at warning or above, through absl's handler on standard error."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # the command has flags of its own; absl's logging asks
    absl_logging.use_absl_handler()
    absl_logging.get_absl_handler().setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    absl_logging.set_verbosity(absl_logging.WARNING)
    absl_logging.set_stderrthreshold("debug")
    for room in ("jaxinfer", "pallas_kernels", "convert", "bench", "__main__"):
        logging.getLogger(room).setLevel(level.upper())
