"""Imported once by the server that test processes are forked from."""

import logging

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

import deepspeed  # noqa: E402
import deepspeed.pipe  # noqa: E402, F401
