"""On a GPU the Mosaic kernels run natively; JAXINFER_TEST_ARCH=80 makes an sm_90 GPU run the path that they take on sm_80."""

import os

if os.environ.get("JAXINFER_TEST_ARCH") == "80":
    from jax.experimental.mosaic.gpu import utils

    utils._infer_arch = lambda: (8, 0)
