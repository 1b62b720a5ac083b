"""Imported once by the server that test processes are forked from."""

import deepspeed
import deepspeed.pipe  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401  (DeepSpeed does at the first engine: seconds)

import launcher.run  # noqa: F401
