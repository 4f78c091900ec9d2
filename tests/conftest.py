import gc
import os
import signal
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# also for programs that tests start: `tiny` is not part of the package
ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

import costs  # noqa: E402
import pytest  # noqa: E402
from transformers import AutoProcessor  # noqa: E402

from tiny.checkpoints import build_tiny_checkpoint  # noqa: E402

# a shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory):
    """Folder of a saved tiny Gemma3 checkpoint, whose vocabulary no tensor parallelism divides."""
    return build_tiny_checkpoint(
        "gemma3", tmp_path_factory.mktemp("tiny") / "gemma3", text={"vocab_size": 577}
    )


@pytest.fixture(scope="session")
def processor(tiny_gemma3):
    return AutoProcessor.from_pretrained(tiny_gemma3)


MANY = 300_000  # objects in the eldest generation: imports make twice as many, and tests far fewer
_path = Path()  # of the test before


@cache
def reads_energon(path: Path) -> bool:
    return "energon" in path.read_text()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Leave what is imported out of garbage collection: Energon collects in every worker that it forks, which
    takes a second and a half there. A loader of Energon without workers undoes it at its end. Collections of
    all the rest stay rare: so far each had to wait for as many new objects as a quarter of what is imported.
    """
    global _path
    known, _path = item.path == _path, item.path
    if known and not reads_energon(item.path):
        return
    # `gc.get_freeze_count` counts one by one, which takes a twentieth of a second: minutes over all tests
    if len(gc.get_objects(generation=2)) > MANY:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 100)


pytest_runtest_call = pytest_runtest_setup  # a fixture may have had such a loader


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    costs.longest_first(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    costs.ends_a_file(nextitem is None or nextitem.path != item.path)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    costs.measure(report)
    return report


def pytest_runtest_logreport(report):
    costs.count(report)


def pytest_terminal_summary(terminalreporter):
    costs.tell(terminalreporter)


def pytest_sessionfinish(session):
    costs.write(session.config)
    gc.unfreeze()  # libraries report what they find alive at the very end
