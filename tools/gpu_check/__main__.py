"""The first half hour of a machine with a GPU: a table of what runs, how exactly and how fast.

python tools/gpu_check [--out FOLDER] [--parts NAMES] [--families NAMES] [--minutes N] [--patience N]
python tools/gpu_check --record FOLDER

Every part runs in a process of its own with a time limit, in the order of `parts.PARTS`. Each value is
printed and appended to FOLDER/rows.jsonl as soon as it is known; gpu_check.json and gpu_check.md have all of
them, and FOLDER/PART.log has what a part said besides. A part that fails or takes too long is a row of the
table, and the next one begins. It exits with 1 if a value is beyond its limit or a part failed.
`--families all` has every family, and not four of them. At its end the table of a card is put into
reports/gpu.json, README.md and docs/reference/gpu.md; `--record` does that with a table from elsewhere.

Without CUDA it has small sizes and shows that the script works, nothing about a GPU.
See docs/reference/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# in place of this folder, whose files are no modules of their own
sys.path[:1] = [str(ROOT / "tools"), str(ROOT), str(ROOT / "tests/helpers")]
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from gpu_check import runner  # noqa: E402
from gpu_check.parts import MINUTES, PARTS  # noqa: E402
from gpu_check.record import record  # noqa: E402
from megatron_vlm.supported import SUPPORTED, too_old  # noqa: E402

FAMILIES = [family for family in SUPPORTED if not too_old(family)]
# windows and image blocks; M-RoPE; experts; gated delta nets
FOUR = [family for family in ("gemma3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5") if family in FAMILIES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="the folder of the table")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--families", nargs="+", default=FOUR, choices=["all", *FAMILIES])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no part begins later")
    parser.add_argument("--patience", type=float, default=1, help="times a part's limit, for a busy machine")
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="put the table of FOLDER into pages")
    arguments = parser.parse_args()
    if arguments.record:
        print(record(arguments.record))
        return
    families = FAMILIES if "all" in arguments.families else arguments.families
    if arguments.only:
        runner.run_here(arguments.only, arguments.out, families)
    else:
        sys.exit(
            runner.run_all(arguments.parts, arguments.out, families, arguments.minutes, arguments.patience)
        )


if __name__ == "__main__":
    main()
