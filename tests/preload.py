"""Imported once by the server that test processes are forked from."""

import deepspeed
import deepspeed.pipe  # noqa: F401
