"""From an encoded prompt and its sampling parameters to checked requests. Queues nothing. No jax."""

import operator
from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.engine.structured import GrammarCompiler
from jaxinfer.errors import RequestError
from jaxinfer.request import Request, read_deadline_s, read_priority
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.processors import ProcessorTable
from jaxinfer.sampling.rules import bad_word_ids, check_rules
from jaxinfer.scheduler.policies import find_policy
from jaxinfer.tokenizer import Tokenizer


def read_token_ids(given: Any) -> tuple[int, ...]:
    """Token ids from any iterable of integers, numpy's among them.

    Raises:
      RequestError: it is none.
    """
    try:
        ids = tuple(given)
    except TypeError:
        raise RequestError(f"prompt_token_ids is a {type(given).__name__}: must be a list of integers.") from None
    try:
        if bool in set(map(type, ids)):
            raise TypeError
        read = tuple(map(operator.index, ids))
    except TypeError:
        raise RequestError("prompt_token_ids: every entry must be an integer.") from None
    longest = max(max(read), -min(read)).bit_length() if read else 0
    if longest > 63:  # too long to be written into a message, perhaps
        raise RequestError(f"prompt_token_ids holds an integer of {longest} bits: no vocabulary has that many tokens.")
    return read


def read_params(given: Any, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, from None, one for all, or a list.

    Raises:
      RequestError: something else, or a list of another length.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * num_prompts
    for p in [given] if not isinstance(given, Sequence) or isinstance(given, str) else given:
        if not isinstance(p, SamplingParams):
            fields = "(**fields)" if isinstance(p, dict) else ""
            raise RequestError(f"sampling parameters of type {type(p).__name__}: give SamplingParams{fields}, one for all or a list.")
    if len(given) != num_prompts:
        raise RequestError(f"{len(given)} sampling parameters for {num_prompts} prompts: give one for all, or one a prompt.")
    return list(given)


def read_each(name: str, given: Any, num_prompts: int) -> list[Any]:
    """One value a prompt, not looked at, from one for all or a list.

    Raises:
      RequestError: a list of another length.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"{name} has {len(given)} entries for {num_prompts} prompts: give one for all, or one a prompt.")
    return list(given)


def check_priority(priority: int, resolved: ResolvedConfig) -> None:
    """Refuses a priority that would have no effect.

    Raises:
      RequestError: it is not 0, and the engine's policy does not look at it.
    """
    policy = resolved.engine.scheduling_policy
    if priority and not find_policy(policy).uses_priority:
        raise RequestError(f"priority = {priority}: it has no effect under scheduling_policy = {policy!r}. Start the engine with 'priority' or "
                           "'preemptive' (or a policy registered with uses_priority=True), or leave priority at 0.")


def make_requests(request_id: str, token_ids: tuple[int, ...], params: SamplingParams, *, seed: int, end_token_ids: frozenset[int],
                  resolved: ResolvedConfig, tokenizer: Tokenizer | None, processors: ProcessorTable, grammars: GrammarCompiler,
                  priority: Any = 0, deadline_s: Any = None) -> list[Request]:
    """The n requests of one prompt.

    Args:
      request_id: of the first where n is 1; else the n requests are named after it.
      token_ids: the prompt, checked already.
      params: what it asks for.
      seed: of the random stream, in [0, 2**32).
      end_token_ids: the model's.
      resolved: the engine's limits.
      tokenizer: None where prompts are ids and texts stay empty.
      processors: the engine's logit processors.
      grammars: the engine's compiler of structured outputs.
      priority: smaller is more urgent.
      deadline_s: seconds from arrival, or None.

    Raises:
      RequestError: something that this engine or this model's vocabulary cannot do.
    """
    for name in ("stop", "bad_words"):
        if getattr(params, name) and tokenizer is None:
            remedy = "Use stop_token_ids." if name == "stop" else "Use logit_bias or allowed_token_ids."
            raise RequestError(f"{name} = {getattr(params, name)!r}: texts need a tokenizer, and this engine has none. {remedy}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > resolved.engine.max_logprobs:
            raise RequestError(f"{name} = {getattr(params, name)}: this engine returns at most max_logprobs = "
                               f"{resolved.engine.max_logprobs}; ask for fewer, or start it with a larger max_logprobs.")
    stop_token_ids = frozenset(params.stop_token_ids or ())
    words = _bad_word_ids(params, tokenizer)
    check_rules(params, words, stop_token_ids | end_token_ids, vocab_size=resolved.model.vocab_size,
                num_valid_tokens=resolved.num_valid_tokens)
    processors.check(params.logits_processors)
    stops = stop_token_ids if params.ignore_eos else stop_token_ids | end_token_ids
    grammar = grammars.grammar(params, words, stops, stop_token_ids | end_token_ids)
    room = resolved.max_model_len - len(token_ids)
    priority, deadline_s = read_priority(priority), read_deadline_s(deadline_s)
    check_priority(priority, resolved)

    def one(index: int) -> Request:
        scores = params.prompt_logprobs is not None and index == 0
        name = request_id if params.n == 1 else f"{request_id}-{index}"
        return Request(
            request_id=name, prompt_token_ids=token_ids, params=params, end_token_ids=end_token_ids, bad_word_ids=words,
            stop_token_ids=stops, grammar=None if grammar is None else grammar.copy(),
            max_total_len=len(token_ids) + min(params.max_tokens or room, room), seed=seed, sample_index=index, scores_prompt=scores,
            priority=priority, deadline_s=deadline_s,
            cache_salt=f"prompt log-probabilities of request {name}" if scores else "")

    return [one(i) for i in range(params.n)]


def _bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    words: Sequence[str] = params.bad_words or ()
    return bad_word_ids(words, lambda text: tokenizer.encode(text, add_special_tokens=False)) if tokenizer is not None else ()
