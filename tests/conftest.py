import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from megatron_vlm.testing.tiny import build_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory):
    """Folder of a saved tiny Gemma3 checkpoint."""
    return build_tiny_checkpoint("gemma3", tmp_path_factory.mktemp("tiny") / "gemma3")
