"""Copying whole pages: contract, validation and the ordered table of implementations. It computes nothing itself."""

from typing import Any

import jax
import numpy as np

from pallas_kernels.contract import ArrayLike, check_rank, dtype_name
from pallas_kernels.copy_pages import kernel_xla, reference
from pallas_kernels.copy_pages.config import CopySpec
from pallas_kernels.dispatch import (
    Choice,
    ContractError,
    Implementation,
    Target,
    choose,
    current_target,
    implementation_scope,
    supports_all,
    traced_once,
)

OP = "copy_pages"


def copy_pages[Pools](
    pools: Pools,       # a pytree of [P, K, Z, H]
    src: jax.Array,     # [U]
    dst: jax.Array,     # [U]
    *,
    implementation: str | None = None,
) -> Pools:
    """Copies page src[u] over page dst[u] in every pool, in place where the pools are DONATED to the enclosing jit.

        pools'[dst[u]] = pools[src[u]] for all u,       all pages are read before any is written

    so that a page may be source of some copies and destination of another (two pages are exchanged by src [1, 2], dst [2, 1]).

    At the edges: a copy of the null page onto itself, (0, 0), does nothing and is the padding for calls of one shape. A page may be copied
    to many; two copies of one call must not name the same destination, unless they name the same source.

    Args:
      pools: a pytree of arrays [P, K, Z, H], of any dtype, all with the same P: key and value pages of all layers. Arrays [P, ...] of
        another rank, such as pages' scales, go along.
      src: [U] int32 page numbers in [0, P).
      dst: [U] int32 page numbers in [0, P).
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      The pools with the copies in them.
    Raises:
      ContractError: shapes or dtypes that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: copy-on-write of pages as in 'Efficient Memory Management for Large Language Model Serving with PagedAttention',
      https://arxiv.org/abs/2309.06180, section 4.4.
    """
    spec = copy_spec(pools, src, dst)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        copied: Pools = traced_once(impl.run, spec=spec, target=target)(pools, src, dst)
        return copied


def copy_pages_choice(spec: CopySpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `copy_pages`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def transfer_pages[Pools](
    pools: Pools,       # a pytree of [P, K, Z, H]
    src: jax.Array,     # [U]
    device: jax.Device | jax.sharding.Sharding,
) -> Pools:             # the pytree with [U, K, Z, H]
    """Pages taken out of their pools and brought to another device, or to the host's memory.

    A gather where the pools are, then jax.device_put. The pools stay as they are and are not to be donated; the transfer is asynchronous, and
    later steps that write the pools in place wait for the gather by themselves. There is one implementation, XLA's.

    Args:
      pools: as in `copy_pages`.
      src: [U] int32 page numbers in [0, P), on the pools' device.
      device: where to: a device; or a sharding, such as SingleDeviceSharding(device, memory_kind="pinned_host") for that device's host.
    Returns:
      The pages, [U, K, Z, H] for each pool.
    Raises:
      ContractError: shapes or dtypes that break the contract, or no device.
    """
    _check_pools("transfer_pages", pools)
    _check_numbers("transfer_pages", "src", src)
    if not isinstance(device, jax.Device | jax.sharding.Sharding):
        raise ContractError(f"transfer_pages: device = {device!r}: must be a jax.Device or a jax.sharding.Sharding; jax.devices() lists the "
                            'devices, and SingleDeviceSharding(device, memory_kind="pinned_host") is the memory of the host.')
    with implementation_scope("transfer_pages", "xla"):
        taken: Pools = jax.device_put(traced_once(kernel_xla.take_pages)(pools, src), device)
        return taken


def insert_pages[Pools](
    pools: Pools,       # a pytree of [P, K, Z, H]
    pages: Pools,       # the pytree with [U, K, Z, H]
    dst: jax.Array,     # [U]
) -> Pools:
    """Puts pages, such as `transfer_pages` returns, into pools, in place where the pools are DONATED to the enclosing jit.

        pools'[dst[u]] = pages[u] for all u

    At the edges: page 0 is the null page, whose contents nobody reads; dst 0 is the padding for calls of one shape. Otherwise no page may be
    named twice. There is one implementation, XLA's.

        pages = transfer_pages(prefill_pools, src, device)
        decode_pools = jax.jit(insert_pages, donate_argnums=0)(decode_pools, pages, dst)

    Args:
      pools: as in `copy_pages`.
      pages: a pytree like the pools' of [U, K, Z, H] arrays of the pools' dtypes, in the pools' memory: pages in a host's
        memory come back by jax.device_put(pages, pool.sharding).
      dst: [U] int32 page numbers in [0, P).
    Returns:
      The pools with the pages in them.
    Raises:
      ContractError: shapes or dtypes that break the contract.
    """
    op = "insert_pages"
    _check_pools(op, pools)
    _check_numbers(op, "dst", dst)
    wanted, given = str(jax.tree.structure(pools)), str(jax.tree.structure(pages))
    if given != wanted:
        raise ContractError(f"{op}: pages is a {given} and pools a {wanted}: give one array of pages for each pool.")
    for (path, pool), page in zip(jax.tree.leaves_with_path(pools), jax.tree.leaves(pages), strict=True):
        shape = [dst.shape[0], *pool.shape[1:]]
        if list(page.shape) != shape or dtype_name(page) != dtype_name(pool):
            raise ContractError(f"{op}: pages{jax.tree_util.keystr(path)} is {dtype_name(page)}{list(page.shape)}: must be {dtype_name(pool)}"
                                f"{shape}, as many pages as dst has and of the pool's shape and dtype; cast or cut it.")
    with implementation_scope(op, "xla"):
        filled: Pools = traced_once(kernel_xla.insert_pages)(pools, pages, dst)
        return filled


def copy_spec(pools: Any, src: ArrayLike, dst: ArrayLike) -> CopySpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `copy_pages`.
    """
    leaves = _check_pools(OP, pools)
    _check_numbers(OP, "src", src)
    _check_numbers(OP, "dst", dst)
    if src.shape != dst.shape:
        raise ContractError(f"{OP}: src {list(src.shape)} and dst {list(dst.shape)} differ in length: name a source and a destination for "
                            "each copy; pad both with 0.")
    page_bytes = sum(int(np.prod(pool.shape[1:])) * np.dtype(pool.dtype).itemsize for pool in leaves)
    return CopySpec(num_pools=len(leaves), num_pages=leaves[0].shape[0], num_copies=src.shape[0], page_bytes=page_bytes)


def _check_pools(op: str, pools: Any) -> list[ArrayLike]:
    """Requires at least one array, all [P, ...] with one P, and returns them."""
    leaves = jax.tree.leaves_with_path(pools)
    if not leaves:
        raise ContractError(f"{op}: pools holds no array: give the key and value pages, [P, K, Z, H] each.")
    for path, pool in leaves:
        name = f"pools{jax.tree_util.keystr(path)}"
        if len(pool.shape) < 2 or 0 in pool.shape:
            raise ContractError(f"{op}: {name} has shape {pool.shape}: must be [P, K, Z, H], or [P, ...], every dimension at least 1.")
        if pool.shape[0] != leaves[0][1].shape[0]:
            raise ContractError(f"{op}: {name} {list(pool.shape)} has {pool.shape[0]} pages, the first pool {leaves[0][1].shape[0]}: "
                                "one page number must serve for all; call once for each size of pool.")
    return [pool for _, pool in leaves]


def _check_numbers(op: str, name: str, numbers: ArrayLike) -> None:
    """Requires int32 [U]."""
    check_rank(op, name, numbers, "U")
    if dtype_name(numbers) != "int32":
        raise ContractError(f"{op}: {name} has dtype {dtype_name(numbers)}: must be int32; cast it.")


def _run_xla(pools: Any, src: jax.Array, dst: jax.Array, *, spec: CopySpec, target: Target) -> Any:
    return kernel_xla.copy_pages(pools, src, dst)


def _run_reference(pools: Any, src: jax.Array, dst: jax.Array, *, spec: CopySpec, target: Target) -> Any:
    return reference.copy_pages(pools, src, dst)


IMPLS: tuple[Implementation[CopySpec], ...] = (
    Implementation(name="xla", reason="a gather and a scatter a pool, in place, CPU and GPU", supports=supports_all, run=_run_xla),
    Implementation(name="reference", reason="the oracle: every page looked up, new pools", supports=supports_all, run=_run_reference),
)
