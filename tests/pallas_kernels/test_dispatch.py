"""The rule that picks an implementation: order, recorded rejections, forced choices that never fall back."""

import pytest

from pallas_kernels import Choice, ContractError, Unsupported, current_target
from pallas_kernels.dispatch import Implementation, Target, choose
from tests.pallas_kernels.paged import A100, CPU, H200


def needs_gpu(spec: int, target: Target) -> Unsupported | None:
    return None if target.platform == "gpu" else Unsupported(f"needs a GPU, not {target.platform}")


def small(spec: int, target: Target) -> Unsupported | None:
    return None if spec < 10 else Unsupported(f"{spec} is 10 or more")


IMPLS = (
    Implementation(name="fast", reason="runs on GPUs", supports=needs_gpu, run=lambda: "fast"),
    Implementation(name="small", reason="small cases anywhere", supports=small, run=lambda: "small"),
)


def test_first_supported_row_is_chosen_and_rejections_are_recorded() -> None:
    assert choose("op", IMPLS, 1, A100, None)[0] == Choice("op", "fast", "runs on GPUs", ())
    choice, impl = choose("op", IMPLS, 1, CPU, None)
    assert choice == Choice("op", "small", "small cases anywhere", (("fast", "needs a GPU, not cpu"),)) and impl.run() == "small"
    assert str(choice) == "op: small (small cases anywhere); not fast: needs a GPU, not cpu"


def test_forced_choice_never_falls_back() -> None:
    assert choose("op", IMPLS, 1, H200, "small")[0] == Choice("op", "small", "asked for by name", ())
    with pytest.raises(Unsupported, match=r"implementation = 'fast' cannot do this case: needs a GPU, not cpu\. Give implementation=None"):
        choose("op", IMPLS, 1, CPU, "fast")
    with pytest.raises(ContractError, match=r"implementation = 'slow' is unknown: give one of fast, small"):
        choose("op", IMPLS, 1, CPU, "slow")


def test_a_row_that_does_not_pay_is_passed_over_unless_asked_for() -> None:
    impls = (Implementation(name="wide", reason="", supports=needs_gpu, run=lambda: "wide", pays=lambda spec, target: "too small"), *IMPLS)
    assert choose("op", impls, 1, H200, None)[0] == Choice("op", "fast", "runs on GPUs", (("wide", "too small"),))
    assert choose("op", impls, 1, H200, "wide")[0].implementation == "wide"
    assert choose("op", impls, 1, CPU, None)[0].rejected == (("wide", "needs a GPU, not cpu"), ("fast", "needs a GPU, not cpu"))


def test_no_row_left_names_every_reason() -> None:
    with pytest.raises(Unsupported, match=r"no implementation supports 11 on cpu: fast: needs a GPU, not cpu; small: 11 is 10 or more"):
        choose("op", IMPLS, 11, CPU, None)


def test_targets() -> None:
    assert current_target().platform in ("cpu", "gpu")
    assert (CPU.shared_memory_bytes, A100.shared_memory_bytes, H200.shared_memory_bytes) == (0, 163 * 1024, 227 * 1024)
