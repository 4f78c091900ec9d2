"""A program for torchrun: each rank writes its environment into a folder, RANK.json."""

import json
import os
import sys
from pathlib import Path

Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
