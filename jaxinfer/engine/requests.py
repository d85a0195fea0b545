"""From an encoded prompt and its sampling parameters to checked requests. Queues nothing. No jax."""

from collections.abc import Sequence

from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.errors import RequestError
from jaxinfer.request import Request
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.rules import bad_word_ids, check_rules
from jaxinfer.tokenizer import Tokenizer


def make_requests(request_id: str, token_ids: tuple[int, ...], params: SamplingParams, *, seed: int, end_token_ids: frozenset[int],
                  resolved: ResolvedConfig, tokenizer: Tokenizer | None) -> list[Request]:
    """The n requests of one prompt.

    Args:
      request_id: of the first where n is 1; else the n requests are named after it.
      token_ids: the prompt, checked already.
      params: what it asks for.
      seed: of the random stream, in [0, 2**32).
      end_token_ids: the model's.
      resolved: the engine's limits.
      tokenizer: None where prompts are ids and texts stay empty.

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
    room = resolved.max_model_len - len(token_ids)

    def one(index: int) -> Request:
        scores = params.prompt_logprobs is not None and index == 0
        name = request_id if params.n == 1 else f"{request_id}-{index}"
        return Request(
            request_id=name, prompt_token_ids=token_ids, params=params, end_token_ids=end_token_ids, bad_word_ids=words,
            stop_token_ids=stop_token_ids if params.ignore_eos else stop_token_ids | end_token_ids,
            max_total_len=len(token_ids) + min(params.max_tokens or room, room), seed=seed, sample_index=index, scores_prompt=scores,
            cache_salt=f"prompt log-probabilities of request {name}" if scores else "")

    return [one(i) for i in range(params.n)]


def _bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    words: Sequence[str] = params.bad_words or ()
    return bad_word_ids(words, lambda text: tokenizer.encode(text, add_special_tokens=False)) if tokenizer is not None else ()
