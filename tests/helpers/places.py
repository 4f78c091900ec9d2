"""Where things lie that tests read, wherever a test lies itself."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
