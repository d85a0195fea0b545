"""What a request may ask of the sampler, checked on the host. No arrays and no jax here."""

import dataclasses
import functools
import json as json_library
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.errors import RequestError

MAX_SEED = 2**32 - 1
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 1e4
"""With these limits no setting takes a model's finite logits out of float32's range."""
MAX_TEMPERATURE = 1e4
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
MAX_N = 1024
MAX_PROCESSOR_NUMBER = 3.4e38
"""Of a logits processor's parameters; a float32 holds it."""
MAX_GRAMMAR_CHARS = 1 << 17
"""Characters of a schema with its whitespace_pattern, an expression, a grammar or of all choices together."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must be; names and meaning follow vLLM's. Exactly one of json, regex, choice, grammar and json_object is given.

    The text follows it from its first character on. A schema keyword that the grammar library does not implement is refused, never
    left out.

    Raises:
      RequestError: none or several are given, or one of the wrong form or longer than 131072 characters.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a mapping (pydantic's Model.model_json_schema() among them) or as JSON text."""
    regex: str | None = None
    """A regular expression that the whole text matches; no look-around, no back-references."""
    choice: Sequence[str] | None = None
    """The texts that may be generated."""
    grammar: str | None = None
    """A context-free grammar in Lark's form, or in the GBNF form of llama.cpp."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """No space between the tokens of JSON, where json or json_object is given."""
    whitespace_pattern: str | None = None
    """A regular expression for what may stand between the tokens of JSON, where json or json_object is given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_object", self.json_object or None)
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", self._as_text(self.json))
        if self.choice is not None:
            ok = isinstance(self.choice, Sequence) and not isinstance(self.choice, str) and len(self.choice) > 0
            _check(ok and all(isinstance(c, str) and c for c in self.choice), _OUTPUTS + "choice", self.choice, "a list of non-empty texts")
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            _check(isinstance(getattr(self, name), str | None) and getattr(self, name) != "", _OUTPUTS + name, getattr(self, name),
                   "a JSON schema, as a mapping or as text" if name == "json" else "a non-empty text")
        for name in ("json_object", "disable_any_whitespace"):
            _check(isinstance(getattr(self, name), bool | None), _OUTPUTS + name, getattr(self, name), "True or False")
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(f"SamplingParams.structured_outputs has {' and '.join(given) or 'nothing'}: must have exactly one of "
                               f"{', '.join(_KINDS)}.")
        texts = (self.json, self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ()))
        num_chars = sum(len(text) for text in texts if isinstance(text, str))
        if num_chars > MAX_GRAMMAR_CHARS:
            raise RequestError(f"SamplingParams.structured_outputs.{given[0]} has {num_chars} characters: must have at most "
                               f"{MAX_GRAMMAR_CHARS}. Give a smaller one.")

    @staticmethod
    def _as_text(schema: Mapping[str, Any]) -> str:
        try:
            return json_library.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"SamplingParams.structured_outputs.json is no JSON: {error}. Give a JSON schema, for example pydantic's "
                               "Model.model_json_schema().") from error


_OUTPUTS = "structured_outputs."


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; names and meaning follow vLLM's.

    Raises:
      RequestError: a value lies outside the range that its field states.
    """

    n: int = 1
    """Number of completions for the prompt; in [1, 1024]."""
    temperature: float = 1.0
    """Logits are divided by this; 0 means greedy (the largest logit, the lowest id on a tie); at most 10000."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability sums to at least this; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this share of the most likely one's; in [0, 1]."""
    seed: int | None = None
    """Seed of the request's own random stream; None draws one from the engine's seed and the request's number."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None means up to the model's length limit."""
    min_tokens: int = 0
    """Tokens to generate before an end token, a stop id or a stop string may end the completion; end tokens and stop ids cannot be
    sampled until then, ignore_eos or not."""
    repetition_penalty: float = 1.0
    """Logits of tokens that stand in the prompt or the output are divided by this where positive, multiplied where negative; in
    [0.001, 1000], 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the output holds; in [-2, 2], 0 is off."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that the output holds it; in [-2, 2], 0 is off."""
    logit_bias: Mapping[int, float] | Sequence[str] | None = None
    """Added to the logits of single tokens: a mapping from token id to a number in [-10000, 10000], or a list of texts ID:NUMBER; at
    most 300."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled; None allows all."""
    bad_words: Sequence[str] | None = None
    """Texts that must not be generated: the last token of each, with and without a space before it, is barred where the output ends
    with the tokens before it."""
    stop: str | Sequence[str] | None = None
    """Strings that end the generation; the text returned stops before the match, or after it with include_stop_str_in_output."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the generation, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens; `stop` and `stop_token_ids` still hold."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the token that ended the completion, at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probabilities to return with each output token: of the sampled one and of this many likeliest, as the model gives them
    (before temperature, penalties, biases and bars); None returns none."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first. Such a prompt is computed whole, past the prefix cache."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """A JSON schema, a regular expression, a choice or a grammar that the text follows; end tokens can be sampled only where it may end
    (with ignore_eos: not at all), and it ends as soon as nothing can follow, min_tokens or not."""
    logits_processors: Mapping[str, Mapping[str, float]] | None = None
    """Processors registered by jaxinfer.register_logits_processor before the engine started, by name, each with its parameters."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, str | Sequence), name, value, "a list, or None")
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        object.__setattr__(self, "logit_bias", _read_biases(self.logit_bias))
        object.__setattr__(self, "structured_outputs", _read_structured_outputs(self.structured_outputs))
        self._check_lengths()
        self._check_distribution()
        self._check_tokens()
        self._check_processors()

    def _check_lengths(self) -> None:
        _check(_is_int(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"an integer in [1, {MAX_N}]")
        _check(self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1), "max_tokens", self.max_tokens,
               "None or an integer >= 1")
        most = "" if self.max_tokens is None else f" and at most max_tokens = {self.max_tokens}"
        _check(_is_int(self.min_tokens) and 0 <= self.min_tokens and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
               "min_tokens", self.min_tokens, f"an integer >= 0{most}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or (_is_int(value) and value >= 0), name, value, "None or an integer >= 0")

    def _check_distribution(self) -> None:
        _check(_is_real(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature,
               f"in [0, {MAX_TEMPERATURE:g}]; 0 is greedy")
        _check(_is_int(self.top_k) and 0 <= self.top_k < 2**31, "top_k", self.top_k, "an integer >= 1, or 0 or -1 to keep every token")
        _check(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]; 1 keeps every token")
        _check(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]; 0 keeps every token")
        _check(self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED), "seed", self.seed,
               f"None or an integer in [0, {MAX_SEED}]")
        _check(_is_real(self.repetition_penalty) and MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
               "repetition_penalty", self.repetition_penalty, f"in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(_is_real(getattr(self, name)) and -2 <= getattr(self, name) <= 2, name, getattr(self, name), "in [-2, 2]; 0 is off")

    def _check_tokens(self) -> None:
        _check(all(isinstance(s, str) and s for s in self.stop or ()), "stop", self.stop, "a non-empty string or a list of them")
        _check(all(isinstance(s, str) and s.strip() for s in self.bad_words or ()), "bad_words", self.bad_words,
               "a list of texts that are more than spaces")
        _check(all(_is_int(t) and t >= 0 for t in self.stop_token_ids or ()), "stop_token_ids", self.stop_token_ids,
               "a list of token ids >= 0")
        if self.allowed_token_ids is not None:
            value = self.allowed_token_ids
            _check(isinstance(value, Sequence) and len(value) > 0 and all(_is_int(t) and t >= 0 for t in value), "allowed_token_ids",
                   value, "None or a list of at least one token id >= 0")
            object.__setattr__(self, "allowed_token_ids", tuple(value))
        biases = self.biases
        bad = {t: bias for t, bias in biases.items() if t < 0 or not abs(bias) <= MAX_LOGIT_BIAS}
        _check(not bad, "logit_bias", bad, f"numbers in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}] for token ids >= 0; to bar a token "
               "use allowed_token_ids or bad_words")
        if len(biases) > MAX_LOGIT_BIASES:
            raise RequestError(f"SamplingParams.logit_bias has {len(biases)} entries: must be at most {MAX_LOGIT_BIASES}. To confine the "
                               "output to a set of tokens use allowed_token_ids, which takes any number.")

    def _check_processors(self) -> None:
        given = {} if self.logits_processors is None else self.logits_processors
        ok = isinstance(given, Mapping) and all(
            isinstance(name, str) and isinstance(values, Mapping) and all(
                isinstance(key, str) and _is_real(v) and abs(v) <= MAX_PROCESSOR_NUMBER for key, v in values.items())
            for name, values in given.items())
        _check(ok, "logits_processors", given, "a mapping from a processor's name to its parameters, each by its name a "
               f"finite number in [-{MAX_PROCESSOR_NUMBER:g}, {MAX_PROCESSOR_NUMBER:g}]")
        object.__setattr__(self, "logits_processors", {name: dict(values) for name, values in given.items()} or None)

    @property
    def guide(self) -> StructuredOutputsParams | None:
        """structured_outputs in its own class."""
        assert not isinstance(self.structured_outputs, Mapping), "__post_init__ read it"
        return self.structured_outputs

    @property
    def biases(self) -> dict[int, float]:
        """logit_bias as a mapping, empty where there is none."""
        assert self.logit_bias is None or isinstance(self.logit_bias, dict), "__post_init__ made it one"
        return self.logit_bias or {}

    @functools.cached_property
    def penalises(self) -> bool:
        """Repeated tokens are penalised."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @functools.cached_property
    def is_counted(self) -> bool:
        """Tokens must be counted for this request: it has penalties, or processors, which may look at the counts."""
        return self.penalises or bool(self.logits_processors)

    @functools.cached_property
    def has_rules(self) -> bool:
        """This request biases or bars single tokens, follows a grammar, or has its logits processed."""
        return bool(self.biases or self.bad_words or self.min_tokens or self.allowed_token_ids is not None
                    or self.structured_outputs is not None or self.logits_processors)

    @functools.cached_property
    def is_greedy(self) -> bool:
        """The largest logit is the token: no draw, no rule, no penalty."""
        return self.temperature == 0 and not (self.penalises or self.has_rules)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Nothing but temperature, top-k, top-p, min-p and the seed matters to the device."""
        return not (self.penalises or self.has_rules or self.logprobs is not None)


def _read_biases(given: Any) -> dict[int, float] | None:
    """Token id -> bias, from a mapping (ids may be texts, as in JSON) or a list of texts ID:NUMBER."""
    if given is None:
        return None
    form = "a mapping from token id to number, or a list of texts ID:NUMBER such as 50256:-100, each id once"
    listed = isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(text, str) for text in given)
    _check(listed or isinstance(given, Mapping), "logit_bias", given, form)
    pairs = [tuple(text.split(":")) for text in given] if listed else list(given.items())
    _check(not any(isinstance(part, bool) for pair in pairs for part in pair), "logit_bias", given, form)
    try:
        biases = {int(str(token)): float(bias) for token, bias in pairs}
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"SamplingParams.logit_bias = {_shown(given)}: must be {form}, of numbers in [-{MAX_LOGIT_BIAS:g}, "
                           f"{MAX_LOGIT_BIAS:g}].") from error
    _check(len(biases) == len(pairs), "logit_bias", given, form)
    return biases


def _read_structured_outputs(given: Any) -> StructuredOutputsParams | None:
    """structured_outputs from its class or a mapping of its fields, as in JSON."""
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    known = [f.name for f in dataclasses.fields(StructuredOutputsParams)]
    _check(isinstance(given, Mapping) and all(name in known for name in given), "structured_outputs", given,
           f"a StructuredOutputsParams, or a mapping with {', '.join(known)}")
    return StructuredOutputsParams(**given)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise RequestError(f"SamplingParams.{name} = {_shown(value)}: must be {limit}.")


def _shown(value: object) -> str:
    """The value as a message shows it: cut where it is long; Python writes out no integer of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "..."
