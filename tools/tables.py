"""Write the numbers of reports/*.json into README.md, docs/ and reports/, each between its own marks.

python tools/tables.py            take the summaries of runs/demo*, rewrite every table
python tools/tables.py --check    exit 1 when a page does not show the numbers of its report
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from gpu_check.parts import LEVELS, PARTS
from megatron_vlm.data.accounts.drops import REASONS
from megatron_vlm.overrides import foreign_names

ROOT = Path(__file__).resolve().parent.parent
NOTHING_AGAIN, ALL_AGAIN = "one GPU, recompute none", "one GPU, recompute full"  # cases of rehearsal_lora
REPORTS, README, DOCS = ROOT / "reports", ROOT / "README.md", ROOT / "docs"


def markdown(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


PARITY = {"logits, abs": "max_abs_logits", "loss, abs": "abs_loss", "gradients, rel": "max_rel_grad"}


def parity(report: list[dict]) -> str:
    """The worst numbers of each family, and its worst gradients in each layout; a failed cell is marked."""
    families, layouts, inputs = (
        list(dict.fromkeys(row[kind] for row in report)) for kind in ("family", "layout", "input")
    )

    def cell(numbers: Iterable[str], **where: str) -> list[str]:
        rows = [row for row in report if all(row[kind] == name for kind, name in where.items())]
        mark = "" if all(row["passed"] for row in rows) else " **failed**"
        return [f"{max(row[name] for row in rows):.1e}{mark}" if rows else "" for name in numbers]

    short = markdown(("family", *PARITY), [[name, *cell(PARITY.values(), family=name)] for name in families])
    long = (
        [layout, *(cell(["max_rel_grad"], family=name, layout=layout)[0] for name in families)]
        for layout in layouts
    )
    tried = textwrap.fill(f"Inputs, as far as a family takes them: {'; '.join(inputs)}.", width=120)
    return (
        f"{short}\n\n{tried}\n\n"
        f"Gradients by layout; an empty cell is a layout that the family does not have.\n\n"
        f"{markdown(('layout', *families), long)}"
    )


def saves(report: dict) -> str:
    """How long training stands still for a checkpoint in both ways, in one sentence."""
    beside, waited, copy = (f"{report[name]:.2f} s" for name in ("beside", "waited", "copy"))
    return (
        f"{report['bytes'] / 1e6:.0f} MB, one process: training stands still for {beside}. With "
        f"`async_save=false` it waits {waited}: a share of {report['ratio']:.1%}. A copy of as many bytes "
        f"alone took {copy}. "
        f"({report['date']}, torch {report['torch']}.)"
    )


def worst(report: list[dict]) -> str:
    """The worst numbers of all cells in one sentence."""
    logits, loss, grads = (
        max(row[n] for row in report) for n in ("max_abs_logits", "abs_loss", "max_rel_grad")
    )
    failed = sum(not row["passed"] for row in report)
    return (
        f"{len(report)} cells (family, layout, input), {failed} failed. Worst difference to Transformers "
        f"in fp32: {logits:.1e} in logits, {loss:.1e} in loss, {grads:.1e} in relative gradients."
    )


def demo(report: dict[str, dict]) -> str:
    """A line for each family that was trained on digits."""
    heads = ("`FAMILY=`", "layout", "one digit", "two digits", "Megatron = exported", "training", "CPU time")
    rows = (
        (
            f"`{run['family']}`",
            run["layout"],
            f"{run['held_out_accuracy']:.1%}",
            f"{run['held_out_read_two_accuracy']:.1%}",
            f"{run['hf_agreement']:.1%}",
            f"{run['train_seconds']:.0f} s",
            f"{run['train_cpu_seconds']:.0f} s",
        )
        for run in report.values()
    )
    return markdown(heads, rows)


def demo_rl(report: dict[str, dict]) -> str:
    """A line for each family that learned digits from rewards."""
    heads = ("`FAMILY=`", "layout", "steps", "samples", "right before", "right after")
    heads += ("GRPO", "its CPU time", "everything")
    rows = (
        (
            f"`{run['family']}`",
            run["layout"],
            run["steps"]["rewarded"],
            f"{run['samples']:,}",
            f"{run['accuracy_before']:.1%}",
            f"{run['accuracy_after']:.1%}",
            f"{run['rl_seconds']:.0f} s",
            f"{run['rl_cpu_seconds']:.0f} s",
            f"{run['total_seconds']:.0f} s",
        )
        for run in report.values()
    )
    return markdown(heads, rows)


def demo_boxes(report: dict[str, dict]) -> str:
    """A line for each family that learned where digits are."""
    heads = ("`FAMILY=`", "layout", "steps", "boxes right", "on another digit", "of the export")
    heads += ("mean overlap", "an answer", "tower", "training", "its CPU time", "everything")
    rows = (
        (
            f"`{run['family']}`",
            run["layout"],
            run["steps"],
            f"{run['boxes_right']:.1%}",
            f"{run['boxes_on_another_digit']:.1%}",
            f"{run['boxes_right_of_export']:.1%}",
            f"{run['mean_overlap']:.0%}",
            f"`{run['example']}`",
            f"{run['tower_seconds']:.0f} s",
            f"{run['train_seconds']:.0f} s",
            f"{run['train_cpu_seconds']:.0f} s",
            f"{run['total_seconds']:.0f} s",
        )
        for run in report.values()
    )
    return markdown(heads, rows)


# report of runs/demo* -> a figure that only its summaries have
DEMOS = {
    "demo.json": "held_out_read_two_accuracy",
    "demo_rl.json": "reward_before",
    "demo_boxes.json": "boxes_right",
}


def gathered(report: dict[str, dict], runs: Path, figure: str = DEMOS["demo.json"]) -> dict[str, dict]:
    """The report of a demo, in which each family's summary found in `runs` replaces the old one."""
    files = sorted(runs.glob("demo*/summary.json"))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    mine = {summary["family"]: summary for summary in found if figure in summary}
    return dict(sorted({**report, **mine}.items()))


def weights(report: dict) -> str:
    """A line for each way of reading or writing, and what was read."""
    heads = (
        "what",
        "GB",
        "GB/s",
        "plain GB/s",
        "of plain",
        "memory over the weights, MB",
        "mapped files, MB",
    )
    rows = (
        (
            row["what"],
            f"{row['nbytes'] / 1e9:.2f}",
            f"{row['rate'] / 1e9:.2f}",
            f"{row['plain_rate'] / 1e9:.2f}",
            f"{row['fraction']:.0%}",
            f"{max(0, row['anonymous'] - row['held'] * row['what'].startswith('import')) / 1e6:.0f}",
            f"{row['mapped'] / 1e6:.0f}",
        )
        for row in report["rows"]
    )
    checkpoint = report["checkpoint"]
    return markdown(heads, rows) + (
        f"\n\n({checkpoint['bytes'] / 1e9:.2f} GB, {checkpoint['layers']} layers, the largest tensor "
        f"{checkpoint['largest_tensor'] / 1e6:.0f} MB; {report['machine']}, {report['date']}, "
        f"{', '.join(f'{name} {version}' for name, version in report['versions'].items())}.)"
    )


def packing(report: dict) -> str:
    """A line for each distribution of lengths, below a line with the limits."""
    numbers = {
        "seconds": "seconds",
        "fill_global": "fill, global",
        "fill_buffer": f"fill, buffer of {report['buffer']:,}",
        "lost": "lost",
        "straggler_tokens": "busiest of 8 ranks: tokens",
        "straggler_patches": "patches",
        "straggler_attention": "attention",
        "straggler_patches_stream": "stream: patches",
        "straggler_attention_stream": "attention",
    }
    limits = [(report["limits"].get(name) or "").split(" ")[-1] for name in numbers]
    limits = ["at least / at most", "", *limits]
    rows = ([row["distribution"], row["capacity"], *(row[n] for n in numbers)] for row in report["rows"])
    return markdown(("lengths", "row", *numbers.values()), [limits, *rows])


def data(report: dict) -> str:
    """A line for each family, image and number of turns: the floor, every path divided by it, and ours
    divided by the floor with text, if that was measured."""
    paths = list(dict.fromkeys(row["path"] for row in report["rows"] if row["path"] != "floor"))
    ratios = {f"{path} / floor": (path, "ratio_to_floor") for path in paths}
    if "floor_and_text" in paths:
        ratios["megatron_vlm / floor_and_text"] = ("megatron_vlm", "ratio_to_floor_and_text")
    cells: dict[tuple, dict[str, dict]] = {}
    for row in report["rows"]:
        cells.setdefault((row["family"], row["image"], row["turns"]), {})[row["path"]] = row
    rows = (
        (
            *case,
            f"{found['floor']['samples_per_second']:.0f}",
            *(f"{found[path][to]:.2f}" if to in found.get(path, ()) else "–" for path, to in ratios.values()),
        )
        for case, found in cells.items()
    )
    heads = ("family", "image", "turns", "floor, samples/s", *ratios)
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    scaling = report["workers"]["scaling"]
    return (
        markdown(heads, rows)
        + f"\n\n(From 1 to 2 workers: {scaling:.2f} times. {report['date']}, {versions}.)"
    )


def adapters(report: list[dict]) -> str:
    """A line for each model: what adapters and full fine-tuning need of one GPU, and where they fit."""
    models: dict[str, dict[tuple[str, str], dict]] = {}
    for row in report:
        models.setdefault(row["model"], {})[row["trained"], row["case"]] = row
    models = {name: rows for name, rows in models.items() if len(rows) >= 3}
    heads = ("model", "parameters", "adapters", "LoRA", "LoRA, recomputed", "all, recomputed")
    heads += ("one GPU of 80 GB", "one GPU of 141 GB", "all trained, of 80 GB", "all trained, of 141 GB")
    ratios = [row["plan_over_rehearsed"] for row in report]
    return (
        markdown(heads, (_model_with_adapters(name, rows) for name, rows in models.items()))
        + f"\n\n({len(report)} steps rehearsed; the plan's memory is {min(ratios):.2f} to "
        f"{max(ratios):.2f} of theirs.)"
    )


def _model_with_adapters(name: str, rows: dict[tuple[str, str], dict]) -> list[str]:
    alone = [rows[case] for case in (("lora", NOTHING_AGAIN), ("lora", ALL_AGAIN), ("full", ALL_AGAIN))]
    free, recomputed, full = (row["memory"] for row in alone)

    def lora_on(capacity: int) -> str:
        if free <= capacity * 1e9:
            return "LoRA"
        if recomputed <= capacity * 1e9:
            return "LoRA, recomputed"
        return f"– ({_fewest(rows.get(('lora', f'fewest of {capacity} GB')))})"

    def full_on(capacity: int) -> str:
        if full <= capacity * 1e9:
            return f"1: {full / 1e9:.0f} GB"
        return _fewest(rows.get(("full", f"fewest of {capacity} GB")))

    return [
        *(f"`{name}`", f"{alone[0]['parameters'] / 1e9:.1f} B", f"{alone[0]['trained_bytes'] / 4e6:.0f} M"),
        *(f"{row['memory'] / 1e9:.0f} GB" for row in alone),
        *(lora_on(capacity) for capacity in (80, 141)),
        *(full_on(capacity) for capacity in (80, 141)),
    ]


def _fewest(row: dict | None) -> str:
    return f"{row['gpus']}, {row['layout']}: {row['memory'] / 1e9:.0f} GB" if row else "not rehearsed"


def recipes(report: list[dict]) -> str:
    """A line for each recipe of a real size."""
    heads = (
        "recipe",
        "parameters",
        "layout",
        "GPUs",
        "GB per GPU",
        "on 2 × the GPUs",
        "on 4 ×",
        "modelled share of the peak",
    )
    rows = (
        (
            f"`{row['recipe']}`",
            f"{row['parameters'] / 1e9:.2f} B",
            row["layout"],
            row["gpus"],
            *(f"{size / 1e9:.0f}" for size in row["bytes"]),
            f"{row['utilisation']:.0%}",
        )
        for row in report
    )
    return markdown(heads, rows)


def step(report: dict) -> str:
    """A line for each family, with and without recomputation, and way of giving rows."""
    heads = ("family", "recomputation", "rows", "speed over padded rows", "over rows alone")
    heads += ("peak memory", "of Transformers' padded rows")
    rows = (
        (
            row["family"],
            row["recompute"],
            row["mode"],
            f"{row['speed_over_hf']:.2f}",
            f"{row['speed_over_hf_alone']:.2f}",
            f"{row['peak_memory'] / 1e9:.2f} GB",
            f"{row['hf_peak_memory'] / 1e9:.2f} GB",
        )
        for row in report["rows"]
    )
    devices = ", ".join(dict.fromkeys(row["device"] for row in report["rows"]))
    return markdown(heads, rows) + f"\n\n({devices}, {report['date']}, torch {report['torch']}.)"


def rehearsal(report: list[dict]) -> str:
    """A line for each recipe and number of GPUs, of its fullest rank."""
    heads = ("recipe", "layout", "GPUs", "batch", "GB of the fullest rank", "the plan's", "GB sent a step")
    fullest: dict[tuple, dict] = {}
    for row in report:
        case = row["recipe"], row["gpus"], row["card"]
        fullest[case] = max(row, fullest.get(case, row), key=lambda one: one["peak_memory"])
    rows = (
        (
            f"`{row['recipe']}`",
            row["layout"],
            f"{row['gpus']:,}",
            row["batch"],
            f"{row['peak_memory'] / 1e9:.1f}",
            f"{row['plan_over_rehearsed']:.2f} ×",
            ", ".join(
                f"{group} {size / 1e9:.0f}" for group, size in row["collective_bytes"].items() if size > 5e8
            ),
        )
        for row in fullest.values()
    )
    ratios = [row["plan_over_rehearsed"] for row in report]
    return (
        markdown(heads, rows)
        + f"\n\n({len(report)} ranks rehearsed; the plan's memory is {min(ratios):.2f} to "
        f"{max(ratios):.2f} of theirs.)"
    )


def waits(report: dict) -> str:
    """A line for each place where the host waits: in which parts, in how many cells, how often in a call."""
    rows = report["rows"]
    lines = []
    for place, why in report["reasons"].items():
        counts = {
            (row["family"], row["layout"], row["rank"], part): places[place]
            for row in rows
            for part, places in row["waits"].items()
            if place in places
        }
        parts = ", ".join(dict.fromkeys(part for *_, part in counts))
        layouts = len({(family, layout) for family, layout, *_ in counts})
        lines.append((f"`{place}`", parts, layouts, max(counts.values(), default=0), why))
    families, layouts = (len({row[kind] for row in rows}) for kind in ("family", "layout"))
    cells = len({(row["family"], row["layout"]) for row in rows})
    return (
        markdown(("place", "in", "of the cells", "most often in a call", "why"), lines)
        + f"\n\n({families} families in {layouts} layouts: {cells} cells, {len(rows)} ranks.)"
    )


def checkpoints(report: dict) -> str:
    """A line for each way to save and load the optimizer."""
    rows = (
        (
            name,
            f"{row['shard'] / 1e6:.0f} MB",
            *(f"{row[what] / 1e6:.0f} MB, {row[what] / row['shard']:.2f} ×" for what in ("save", "load")),
        )
        for name, row in report["checkpoints"].items()
    )
    return markdown(("optimizer", "a rank's part of the files", "to save", "to load"), rows) + (
        f"\n\n({report['ranks']} processes under data parallelism, bf16, torch {report['torch']}, "
        f"{report['date']}.)"
    )


def gradients(report: dict) -> str:
    """A line for each family and number of micro batches."""
    rows = (
        (f"`{family}`", row["micro_batches"], *(f"{row[n]:.1e}" for n in ("fp32", "bf16", "between")))
        for family, found in report["gradients"].items()
        for row in found
    )
    heads = ("family", "micro batches of a rank", "reduced in fp32", "reduced in bf16", "between the two")
    return markdown(heads, rows)


def exchange(report: dict) -> str:
    """A line for each kind of row and number of ranks."""
    rows = (
        (
            f"{row['tokens'] // 1024}k",
            f"{row['mean']:,} tokens" if row["mean"] else "one",
            row["ranks"],
            *(
                cell
                for received, work in (row["by_heads"], row["by_states"])
                for cell in (f"{received / 1e6:.0f} MB", f"{work:.2f}")
            ),
        )
        for row in report["rows"]
    )
    heads = ("row", "documents", "ranks", "heads: received", "work", "states: received", "work")
    fewer = [row["by_heads"][0] / row["by_states"][0] for row in report["rows"]]
    most = {way: max(row[way][1] for row in report["rows"]) for way in ("by_heads", "by_states")}
    return (
        f"{markdown(heads, rows)}\n\n(`{report['model']}`, means of {report['rows_of_a_case']} rows. "
        f"States are {min(fewer):.0f} to\n{max(fewer):.0f} times fewer bytes. The slowest rank has up to "
        f"{most['by_heads']:.1f} times the mean by heads, and\n{most['by_states']:.1f} times by states.)"
    )


def gpu_box(report: dict) -> str:
    """A line for each level of the check of a GPU: where its parts ran last."""
    parts = report["parts"]
    link = "[`python tools/gpu_check`](docs/reference/gpu.md)"
    if parts:
        lines = [f"The lines on GPUs are of {link}, which writes them:"]
    else:
        shows = f"{link} shows in half an hour what works on a card, and writes it here"
        lines = [f"**No run on a GPU is recorded.** {shows}:"]
    lines += ["- CPU: all but kernels for CUDA and NCCL, tested by `.ci/run` against Transformers"]
    for level, what in LEVELS.items():
        names = [name for name, part in PARTS.items() if part.level == level]
        ran = [name for name in names if name in parts]
        places = "; ".join(dict.fromkeys(gpu_run(parts[name]["about"]) for name in ran))
        wrong = [f"`{name}`" for name in ran if gpu_wrong(parts[name])]
        count = f", {len(ran)} of {len(names)} parts" if ran else ""
        found = f"; **wrong values** in {', '.join(wrong)}" if wrong else ""
        lines.append(f"- GPU, {level} ({what}): {places or 'not run yet'}{count}{found}")
    return "\n".join(lines)


def gpu_run(about: dict) -> str:
    versions = [f"{name} {about[name]}" for name in ("torch", "transformers", "driver") if name in about]
    return ", ".join((about["date"][:10], about["card"], *versions))


def gpu_wrong(part: dict) -> list[str]:
    return [row["what"] for row in part["rows"] if row["verdict"] == "WRONG"]


def gpu(report: dict) -> str:
    """A line for each part of the check of a GPU, with what was wrong."""
    rows = []
    for level in LEVELS:
        for name in (name for name, part in PARTS.items() if part.level == level):
            run = report["parts"].get(name)
            wrong = "; ".join(what[:100].replace("|", "/") for what in gpu_wrong(run)) if run else ""
            counted = (len(run["rows"]), wrong or "none") if run else ("", "")
            rows.append((level, f"`{name}`", gpu_run(run["about"]) if run else "not yet", *counted))
    return markdown(("level", "part", "last run", "values", "wrong"), rows)


def bundle(report: dict) -> str:
    """The largest wheels of the last bundle, and its size."""
    largest = sorted(report["wheels"], key=lambda each: -each["bytes"])[:5]
    rows = [["-".join(each["wheel"].split("-")[:2]), f"{each['bytes'] / 2**20:.1f}"] for each in largest]
    rest = report["bytes"] - sum(each["bytes"] for each in largest)
    others = f"{len(report['wheels']) - len(rows)} other wheels, and what the check reads"
    rows.append([others, f"{rest / 2**20:.1f}"])
    rows.append(["all", f"{report['bytes'] / 2**20:.1f}"])
    return f"{markdown(('wheel', 'MiB'), rows)}\n\nMade on {report['date']}. {bundle_rehearsed(report)}"


def bundle_rehearsed(report: dict) -> str:
    if (found := report.get("rehearsal")) is None:
        return "It has not been rehearsed."
    wrong = ", ".join(f"{row['part']}: {row['what']}" for row in found["wrong"]) or "none of them is wrong"
    versions = f"under torch {found['torch']} with Transformers {found['transformers']}"
    counted = f"{len(found['parts'])} parts gave {sum(found['parts'].values())} values; {wrong}."
    asked = " ".join(("run.sh", *found["arguments"]))
    return f"Rehearsed on {found['date'][:10]} (`{asked}`) from the bundle alone,\n{versions}: {counted}"


def cubins_fla(report: dict) -> str:
    """What each kernel needs, over the heads that it was compiled for."""
    rows = []
    for name in next(iter(report.values()))["kernels"]:
        each = [heads["kernels"][name] for heads in report.values()]
        found = [compiled for heads in each for compiled in heads["compiled"]]
        ends = [
            sorted({of(numbers[key] for numbers in found) for of in (min, max)})
            for key in ("registers", "stack", "shared")
        ]
        number = f"{len(found)} of {sum(heads['listed'] for heads in each)}"
        rows.append([f"`{name}`", number, *(" to ".join(map(str, pair)) for pair in ends)])
    columns = ("kernel", "configurations compiled", "registers", "bytes of stack", "bytes of shared memory")
    packages = next(iter(report.values()))["packages"]
    heads = ", ".join(report)
    versions = ", ".join(f"{name} {number}" for name, number in packages.items())
    return f"{markdown(columns, rows)}\n\nHeads of keys and of values: {heads}. With {versions}."


def cubins(report: dict) -> str:
    """A line for each fused function: its kernels, and the most that one of them needs."""
    functions: dict[str, list[dict]] = {}
    for row in report["rows"]:
        functions.setdefault(row["function"], []).append(row)
    rows = (
        (
            name,
            len({row["kernel"] for row in found}),
            len(found),
            *(f"{max(row[most] for row in found):,}" for most in ("registers", "stack", "shared")),
        )
        for name, found in functions.items()
    )
    heads = ("function", "kernels", "configurations", "registers of a thread", "its stack, bytes")
    heads += ("shared memory of a block, bytes",)
    return (
        f"{markdown(heads, rows)}\n\n(torch {report['torch']}, Triton {report['triton']}, {report['date']}.)"
    )


def boxes(report: dict) -> str:
    """A line for each family and size of image: what a row with boxes costs, in others."""
    heads = ("family", "image", "to the same text", "to a row without boxes")
    rows = ((row["family"], row["image"], row["written"], row["without"]) for row in report["rows"])
    return markdown(heads, rows)


def drops() -> str:
    """A line for each reason to drop a sample, with the remedy that a run prints; `<image>` is no HTML."""
    rows = ((f"`{reason}`", re.sub(r"<\w+>", r"`\g<0>`", remedy)) for reason, remedy in REASONS.items())
    return markdown(("reason", "what to do"), rows)


TOOLS = {
    "bridge": "Megatron-Bridge",
    "hf": "Transformers, TRL, peft",
    "swift": "ms-swift",
    "lf": "LLaMA-Factory",
}


def same_names() -> str:
    """A line for each setting that other tools' names set: what each tool calls it."""
    names: dict[str, dict[str, list[str]]] = {}
    for name, (setting, tools, difference) in foreign_names().items():
        for tool in tools.split() if not difference else ():
            names.setdefault(setting, {}).setdefault(tool, []).append(f"`{name}`")
    cells = ([f"`{key}`", *(", ".join(of.get(tool, ())) for tool in TOOLS)] for key, of in names.items())
    return markdown(("here", *TOOLS.values()), cells)


def other_names() -> str:
    """A line for each name that means something else here, or has no setting."""
    rows = {name: row for name, row in foreign_names().items() if row[2]}
    cells = (
        [
            f"`{name}`",
            ", ".join(TOOLS[tool] for tool in tools.split()),
            f"`{key}`" if key else "–",
            difference,
        ]
        for name, (key, tools, difference) in rows.items()
    )
    return markdown(("name", "of", "here", "what differs"), cells)


# name of the marks -> (report, or None if the package's code is the source; page; function)
TABLES: dict[str, tuple[str | None, Path, Callable[..., str]]] = {
    "worst": ("parity.json", README, worst),
    "parity": ("parity.json", REPORTS / "parity.md", parity),
    "demo": ("demo.json", REPORTS / "demo.md", demo),
    "demo_rl": ("demo_rl.json", REPORTS / "demo.md", demo_rl),
    "demo_boxes": ("demo_boxes.json", REPORTS / "demo.md", demo_boxes),
    "weights": ("bench_weights.json", REPORTS / "weights.md", weights),
    "packing": ("bench_packing.json", DOCS / "how-to" / "packing.md", packing),
    "boxes": ("bench_boxes.json", DOCS / "how-to" / "boxes.md", boxes),
    "saves": ("bench_saves.json", DOCS / "how-to" / "resume.md", saves),
    "data": ("bench_data.json", REPORTS / "data-speed.md", data),
    "plan": ("plan.json", DOCS / "reference" / "recipes.md", recipes),
    "adapters": ("rehearsal_lora.json", DOCS / "reference" / "recipes.md", adapters),
    "drops": (None, DOCS / "how-to" / "troubleshooting.md", drops),
    "rehearsal": ("rehearsal.json", REPORTS / "rehearsal.md", rehearsal),
    "waits": ("waits.json", REPORTS / "waits.md", waits),
    "checkpoints": ("bench_optimizer.json", DOCS / "reference" / "checkpoints.md", checkpoints),
    "gradients": ("bench_optimizer.json", DOCS / "design" / "exactness.md", gradients),
    "exchange": ("delta_exchange.json", DOCS / "design" / "streams.md", exchange),
    "step": ("bench_step.json", REPORTS / "step-speed.md", step),
    "gpu_box": ("gpu.json", README, gpu_box),
    "gpu": ("gpu.json", DOCS / "reference" / "gpu.md", gpu),
    "cubins": ("cubins.json", DOCS / "reference" / "gpu.md", cubins),
    "cubins_fla": ("cubins_fla.json", DOCS / "reference" / "gpu.md", cubins_fla),
    "same_names": (None, DOCS / "how-to" / "coming-from.md", same_names),
    "other_names": (None, DOCS / "how-to" / "coming-from.md", other_names),
    "bundle": ("bundle.json", DOCS / "reference" / "gpu.md", bundle),
}


def replaced(page: str, table: str, name: str) -> str:
    """The page with the text between the table's marks replaced. Raises ValueError if there are no marks."""
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"no {first} … {last}; put both where the table belongs.")
    return f"{before}{first}\n{table}\n{last}{after}"


def main() -> None:
    check = "--check" in sys.argv
    if not check:
        for name, figure in DEMOS.items():
            file = REPORTS / name
            report = gathered(json.loads(file.read_text(encoding="utf-8")), ROOT / "runs", figure)
            file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name, (report, page, table) in TABLES.items():
        old = page.read_text(encoding="utf-8")
        values = [json.loads((REPORTS / report).read_text(encoding="utf-8"))] if report else []
        new = replaced(old, table(*values), name)
        if check and new != old:
            source = f"the numbers of reports/{report}" if report else "what the package's code says"
            sys.exit(f"{page.name} does not show {source}; run tools/tables.py")
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
