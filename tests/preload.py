"""Imported once by the server that test processes are forked from."""

import deepspeed  # noqa: F401
import deepspeed.pipe  # noqa: F401
