"""Train by a recipe: run_recipe.py --recipe gemma3_vl_4b --train_data_path DATASET tp=4 train.steps=10

`key=value` is a keyword argument of the recipe, `key.path=value` any setting of what it returns; the same
as `megatron-vlm train`. Start it with torchrun, or let it start the processes: --nproc 8.
"""

from megatron_vlm import cli
from megatron_vlm.cli import run, single

if __name__ == "__main__":
    run(single(cli.train), "run_recipe.py")
