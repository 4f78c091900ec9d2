"""With `tp_comm_overlap`, linears exchange rows while they multiply: logits and gradients are the same."""

from dataclasses import replace
from typing import Any

import parity
import pytest
import saved_cases
from adapter_runs import largest_difference, outcome

from megatron_vlm.config import AdapterConfig, ParallelConfig
from megatron_vlm.models.hf import open_source
from megatron_vlm.validate import layout_problems
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

CASES: dict[str, tuple[int, dict[str, Any]]] = {  # name -> ranks that share a layer, settings
    "fp32": (4, {}),
    "added in the product": (4, {}),  # gradients of weights, as on CUDA
    "recomputed": (2, {"recompute": "full"}),
    "frozen": (2, {"freeze": ["language_model"]}),
    "adapters": (2, {"adapter": AdapterConfig(r=4, target_modules="all-linear")}),
}
MICRO_BATCHES = 2
LARGEST = 1e-6  # difference, of the largest number of a tensor; measured: 0
LINEARS = {"gathered": 2, "scattered": 2}  # of a layer: q k v, gate and up; output, down


def every_case(path: str, file: str) -> dict[str, dict[str, float]]:
    """By case: the largest difference, and how often the overlapped products were called."""
    from megatron_vlm.parallel import linears, setup

    setup.init_distributed(ParallelConfig(tp=2), seed=1)
    case, calls, found = saved_cases.read(file), {}, {}
    counted(linears, calls)
    for name, (tp, settings) in CASES.items():
        layout = ParallelConfig(tp=tp, distributed_optimizer=False)
        if name == "added in the product":
            linears.DEVICES.append("cpu")
        else:
            expected = outcome(path, case, layout, **settings)
        assert not calls
        ours = outcome(path, case, replace(layout, tp_comm_overlap=True), **settings)
        linears.DEVICES[:] = ["cuda", "meta"]
        found[name] = {"difference": largest_difference(ours, expected), **calls}
        calls.clear()
    return found


def counted(overlapped: Any, calls: dict[str, int]) -> None:
    def counting(name: str, product: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return product(*args, **options)

        return call

    for name in LINEARS:
        setattr(overlapped, f"{name}_product", counting(name, getattr(overlapped, f"{name}_product")))


@pytest.mark.long
def test_logits_and_gradients_are_those_without_overlap(tmp_path):
    """On two and four ranks; with biases, frozen, with adapters, and recomputed."""
    source = open_source(
        build_tiny_checkpoint("qwen2_vl", tmp_path / "model", text={"num_key_value_heads": 4})
    )
    parity.save_case(source, ["it", "t"], tmp_path / "case.pt")
    layers = source.description.text.num_hidden_layers
    for rank in run_distributed(4, every_case, str(tmp_path / "model"), str(tmp_path / "case.pt")):
        assert list(rank) == list(CASES)
        for name, found in rank.items():
            assert found["difference"] <= LARGEST, name
            passes = 3 if name == "recomputed" else 2  # one of them for the logits
            calls = {kind: count * passes for kind, count in LINEARS.items()}
            calls["gathered"] += LINEARS["scattered"]  # the gradients of outputs
            if name in ("frozen", "adapters"):  # else the weights' gradients hide the exchange
                calls["scattered"] += LINEARS["gathered"]
            for kind, of_layer in calls.items():
                assert found[kind] == of_layer * layers * MICRO_BATCHES, (name, kind)


def test_what_is_overlapped_is_sequence_parallelism():
    [problem] = layout_problems(ParallelConfig(tp=2, sp=False, tp_comm_overlap=True), None)
    assert problem == ("parallel: tp_comm_overlap needs sequence parallelism; turn it off, or drop sp=false.")
    assert not list(layout_problems(ParallelConfig(tp=1, tp_comm_overlap=True), None))
