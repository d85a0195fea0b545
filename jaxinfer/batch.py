"""Runs the prompts of one call to their ends, beside whoever else steps the engine. Makes no requests and keeps no texts."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.engine.engine import Engine
from jaxinfer.errors import EngineError, RequestError
from jaxinfer.groups import Group, Groups, failed
from jaxinfer.request import Request, RequestOutput


def step(engine: Engine) -> list[Request]:
    """A step for a caller whose requests have not all ended."""
    if not engine.has_work:
        raise EngineError("internal error: requests are open and the engine has no work for them. Make a new LLM (LLM.from_model shares "
                          "the weights), and please report this.")
    return engine.step()


def run(asked: Sequence[Group | RequestOutput], groups: Groups, engine: Engine, *, use_tqdm: bool, on_error: str,
        on_output: Callable[[int, RequestOutput], None]) -> list[RequestOutput]:
    """Queues groups, steps until all are done and gathers their outputs in order.

    Args:
      asked: what to run; an output stands for a prompt that was refused already.
      groups: who made them.
      engine: whose steps run them.
      use_tqdm: as LLM.generate has it, as are the remaining arguments.
    """
    results: dict[int, RequestOutput] = {i: g for i, g in enumerate(asked) if isinstance(g, RequestOutput)}
    live: dict[str, int] = {}
    open_groups = {i: g for i, g in enumerate(asked) if not isinstance(g, RequestOutput)}
    try:
        for i, group in list(open_groups.items()):
            try:
                groups.add(group)
                live.update({r.request_id: i for r in group.requests})
            except RequestError as error:
                if on_error == "raise":
                    raise
                results[i] = failed({"prompt_token_ids": group.requests[0].prompt_token_ids}, error)
                groups.finish(open_groups.pop(i))
        for i, output in results.items():
            on_output(i, output)
        with _progress_bar(len(open_groups), use_tqdm) as bar:
            for index in steps_to_ends(engine, open_groups, live):
                results[index] = groups.output(open_groups[index])
                groups.finish(open_groups.pop(index))
                on_output(index, results[index])
                bar.update(1)
    finally:
        for group in open_groups.values():
            groups.finish(group)
    return [results[i] for i in range(len(asked))]


def steps_to_ends(engine: Engine, open_groups: Mapping[int, Group], live: Mapping[str, int]) -> Iterator[int]:
    """Steps until the taker has taken all groups out; gives the index of each as it ends, also where others' steps ended it.

    Args:
      engine: steps for all.
      open_groups: index -> group; the taker removes what it was given.
      live: the engine's request id -> index.
    """
    seen = -1
    while open_groups:
        ended = [i for i, group in open_groups.items() if group.is_finished] if seen != engine.num_step_calls else []
        if not ended and not engine.has_work:
            ended = [i for i, group in open_groups.items() if group.is_finished]  # withdrawn from outside
        seen = engine.num_step_calls
        if not ended:
            touched = dict.fromkeys(live.get(r.request_id) for r in step(engine))  # None: another caller's, such as an open stream
            seen += 1
            ended = [i for i in touched if i is not None and i in open_groups and open_groups[i].is_finished]
        yield from ended


def _progress_bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not shown, unit="prompt", file=sys.stderr)
