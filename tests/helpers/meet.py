"""Prints why torchrun is refused, for each of some environments and numbers of restarts."""

from __future__ import annotations

import json
import os
import sys

from megatron_vlm.commands.program import torchrun
from megatron_vlm.config import ConfigError

before = dict(os.environ)
for environment, restarts in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update({**before, **environment})
    try:
        torchrun(1, [], "no_module", restarts=restarts)
    except ConfigError as error:
        print(f"ConfigError: {error}")
