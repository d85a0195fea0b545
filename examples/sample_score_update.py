"""Sample with the engine, score with the model, step the live weights, sample again: a policy gradient in one process.

  python examples/sample_score_update.py                        a tiny random model, half a minute on a CPU
  python examples/sample_score_update.py --model=DIR            a converted checkpoint (float32: plain SGD loses small steps in bfloat16)

The engine and the gradient step share one set of arrays. Completions that hold more even token ids than their batch are rewarded
(a stand-in for a verifier), and the gradient of the reward-weighted log-likelihood moves the weights:

    loss = -mean over completions of (reward - mean reward) * sum over its tokens of log p(token | tokens before)
"""

import argparse
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer.engine.load import LoadedModel, random_model, teacher_forced_logits
from jaxinfer.models.shapes import SHAPES
from jaxinfer.request import RequestOutput

type Params = dict[str, jax.Array]

MAX_TOKENS = 16
PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8], [1, 1, 2, 3, 5, 8], [9, 9]]
MAX_LEN = max(map(len, PROMPTS)) + MAX_TOKENS


def sample(llm: jaxinfer.LLM, num_samples: int, seed: int) -> list[RequestOutput]:
    """num_samples completions of each prompt, with the engine's log-probability of each token."""
    params = jaxinfer.SamplingParams(n=num_samples, temperature=1.0, max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True, logprobs=0)
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)


def batch_of(outputs: list[RequestOutput]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [B, T] int32, lengths [B] int32, mask [B, T] bool: sampled tokens, engine's log-probabilities [B, T] float32)."""
    rows = [(o.prompt_token_ids, c) for o in outputs for c in o.outputs]
    tokens, mask = np.zeros((len(rows), MAX_LEN), np.int32), np.zeros((len(rows), MAX_LEN), bool)
    logprobs, lengths = np.zeros((len(rows), MAX_LEN), np.float32), np.zeros(len(rows), np.int32)
    for b, (prompt, completion) in enumerate(rows):
        lengths[b] = len(prompt) + len(completion.token_ids)
        tokens[b, :lengths[b]] = [*prompt, *completion.token_ids]
        mask[b, len(prompt):lengths[b]] = True
        pairs = zip(completion.logprobs or [], completion.token_ids, strict=True)
        logprobs[b, len(prompt):lengths[b]] = [entry[token].logprob for entry, token in pairs]
    return tokens, lengths, mask, logprobs


def scores(graphdef: Any, params: Mapping[str, jax.Array], tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B, T] float32: the log-probability of each token after those before it; 0 for the first, which nothing precedes."""
    logits = teacher_forced_logits(graphdef, params, tokens, lengths)  # [B, T, V]
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def rewards_of(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[B] float32: the share of even ids among the sampled ones."""
    return ((tokens % 2 == 0) & mask).sum(1) / mask.sum(1)


def make_step(model: LoadedModel, learning_rate: float) -> "jax.stages.Wrapped":
    """A jitted SGD step: (params, tokens, lengths, mask, rewards) -> new params, the old ones untouched."""
    def loss(params: Params, tokens: jax.Array, lengths: jax.Array, mask: jax.Array, rewards: jax.Array) -> jax.Array:
        likelihood = (scores(model.graphdef, params, tokens, lengths) * mask).sum(1)
        return -((rewards - rewards.mean()) * likelihood).mean()

    def step(params: Params, *batch: jax.Array) -> Params:
        return jax.tree.map(lambda p, g: p - (learning_rate * g).astype(p.dtype), params, jax.grad(loss)(params, *batch))

    return jax.jit(step)  # no donate_argnums: the engine uses the old weights until update_weights


def main(argv: list[str] | None = None) -> list[float]:
    """Runs the rounds; returns the mean reward of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="converted checkpoint; default: a tiny random model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--num_samples", type=int, default=16, help="completions of each prompt")
    parser.add_argument("--learning_rate", type=float, default=2.0)
    args = parser.parse_args(argv)

    model = jaxinfer.load(args.model, dtype="float32") if args.model else random_model(SHAPES["tiny"], dtype="float32", seed=0)
    llm = jaxinfer.LLM.from_model(model, deterministic=True, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=64,
                                  page_size=16, compilation_cache_dir=None)
    shared = sum(llm.engine.model.params[name] is x for name, x in model.params.items())
    print(f"{shared} of {len(model.params)} weights are shared with the engine, not copied")
    score, step = jax.jit(scores, static_argnums=0), make_step(model, args.learning_rate)
    params, history = dict(model.params), []
    for i in range(args.rounds):
        tokens, lengths, mask, engine_logprobs = batch_of(sample(llm, args.num_samples, seed=i))
        off = np.abs(np.asarray(score(model.graphdef, params, tokens, lengths)) - engine_logprobs)[mask].max()
        rewards = rewards_of(tokens, mask)
        history.append(float(rewards.mean()))
        print(f"round {i}: reward {history[-1]:.3f}; model.logits and the engine differ by at most {off:.1e} in {mask.sum()} log-probabilities")
        before, params = params, step(params, tokens, lengths, mask, rewards)
        num_compiles = llm.metrics()["num_compiles_after_warmup"]
        llm.update_weights(params)
        num_compiles = llm.metrics()["num_compiles_after_warmup"] - num_compiles
        moved = max(np.abs(np.asarray(params[name]) - np.asarray(before[name])).max() for name in params)
        print(f"         weights moved by up to {moved:.1e}; {num_compiles} compiles for their exchange")
    print(f"reward {history[0]:.3f} -> {history[-1]:.3f}")
    return history


if __name__ == "__main__":
    main()
