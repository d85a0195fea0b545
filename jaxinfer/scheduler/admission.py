"""Refuses, with the arithmetic, requests that no amount of waiting would serve. Plain Python: never imports jax."""

from jaxinfer.errors import RequestError
from jaxinfer.request import Request
from jaxinfer.scheduler.pages import PageAllocator


def refuse_what_never_fits(request: Request, *, max_model_len: int, pages: PageAllocator) -> None:
    """Checks a request against the limits of the engine.

    Raises:
      RequestError: empty prompt, no room for output, longer than max_model_len, or more pages than the pool has.
    """
    num_prompt, total = len(request.prompt_token_ids), request.max_total_len
    name = f"request {request.request_id!r}"
    if num_prompt == 0:
        raise RequestError(f"{name}: the prompt is empty; give at least one token.")
    if total > max_model_len:
        raise RequestError(f"{name}: prompt and output may take {total} tokens, max_model_len is {max_model_len}; shorten the prompt, "
                           "lower max_tokens or raise max_model_len.")
    if num_prompt >= total:
        raise RequestError(f"{name}: the prompt has {num_prompt} tokens and prompt plus output may have {total}, which leaves no room "
                           "for output; shorten the prompt or raise max_model_len.")
    num_needed = pages.num_pages_for(total - 1)  # the last token's K/V is never computed
    if num_needed > pages.capacity:
        raise RequestError(
            f"{name}: {num_prompt} prompt and {total - num_prompt} output tokens need {num_needed} pages of {pages.page_size} tokens "
            f"({total - 1} / {pages.page_size}, rounded up; the last token is not stored), and the pool has {pages.capacity}; shorten "
            "the prompt, lower max_tokens or give the KV cache more memory.")
